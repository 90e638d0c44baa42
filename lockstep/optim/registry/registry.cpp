#include <lockstep/optim/registry/registry.h>

#include <algorithm>
#include <cctype>
#include <mutex>

#include <lockstep/base/error.h>
#include <lockstep/optim/registry/optimizers.h>

namespace lockstep::optim {

namespace {

struct Registry {
  std::mutex mutex;
  std::vector<OptimizerType> types;
};

Registry& registry() {
  static Registry all = [] {
    std::vector<OptimizerType> types;
    for_each_optimizer([&](std::vector<std::string> names, OptimizerOptions options) {
      types.push_back({std::move(names), std::move(options)});
    });
    return Registry{.mutex = {}, .types = std::move(types)};
  }();
  return all;
}

std::string lower(std::string text) {
  std::ranges::transform(text, text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

}  // namespace

std::vector<OptimizerType> optimizer_types() {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  return all.types;
}

std::string name_of(const OptimizerOptions& options) {
  for (const OptimizerType& type : optimizer_types())
    if (type.options.type() == options.type()) return type.names.front();
  return options.type().name();
}

void register_optimizer_type(OptimizerType type) {
  if (type.names.empty())
    throw UsageError("an optimizer is registered without a name: give what configs call it");
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  for (const std::string& name : type.names)
    for (const OptimizerType& other : all.types)
      for (const std::string& taken : other.names)
        if (lower(name) == lower(taken))
          throw UsageError("an optimizer is registered as '{}', which another one is called "
                           "already: choose another name",
                           name);
  all.types.push_back(std::move(type));
}

}  // namespace lockstep::optim
