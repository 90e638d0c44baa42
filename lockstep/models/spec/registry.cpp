// The families that there are: a new one of ours is a row here, and one in make_model.cpp.
#include <algorithm>
#include <list>
#include <mutex>

#include <lockstep/base/error.h>
#include <lockstep/models/gpt2/spec/spec.h>
#include <lockstep/models/llama/spec/spec.h>
#include <lockstep/models/qwen2/spec/spec.h>
#include <lockstep/models/spec/family.h>

namespace lockstep::models {

namespace {

// One for the whole process, since a config names a family wherever it is read. Rows are added and
// never change.
struct Registry {
  std::mutex mutex;
  std::list<Family> families = {gpt2(), llama(), qwen2()};
};

Registry& registry() {
  static Registry all;
  return all;
}

void check_complete(const Family& family) {
  const auto need = [&](const char* what, bool there) {
    if (!there)
      throw UsageError("the model family '{}' has no {}: models/spec/family.h says what it is",
                       family.name, what);
  };
  need("name", !family.name.empty());
  need("title", !family.title.empty());
  need("intermediate_size", family.intermediate_size != nullptr);
  need("layers", family.layers != nullptr);
  need("read", family.read != nullptr);
  need("write", family.write != nullptr);
  need("loss", family.loss != nullptr);
}

}  // namespace

const Family& family_named(std::string_view name) {
  {
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    const auto found = std::ranges::find(all.families, name, &Family::name);
    if (found != all.families.end()) return *found;
  }
  throw UsageError("there is no model family \"{}\": there are {}. A program of one's own adds one "
                   "with models::register_family()",
                   name, families_that([](const Family&) { return true; }));
}

std::vector<std::string> family_names() {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  std::vector<std::string> names;
  for (const Family& family : all.families) names.push_back(family.name);
  return names;
}

std::string families_that(const std::function<bool(const Family&)>& holds) {
  std::string text;
  std::vector<std::string> names = family_names();
  std::erase_if(names, [&](const std::string& name) { return !holds(family_named(name)); });
  for (std::size_t i = 0; i < names.size(); ++i)
    text += fmt::format("{}\"{}\"", i == 0 ? "" : i + 1 == names.size() ? " or " : ", ", names[i]);
  return text;
}

void add_family(Family family) {
  check_complete(family);
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  if (std::ranges::find(all.families, family.name, &Family::name) != all.families.end())
    throw UsageError("there is a model family \"{}\" already: give the new one another name",
                     family.name);
  all.families.push_back(std::move(family));
}

}  // namespace lockstep::models
