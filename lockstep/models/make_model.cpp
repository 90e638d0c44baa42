#include <lockstep/models/make_model.h>

#include <map>
#include <mutex>
#include <string>

#include <lockstep/base/error.h>
#include <lockstep/models/gpt2/gpt.h>
#include <lockstep/models/initial_weights.h>
#include <lockstep/models/llama/llama.h>
#include <lockstep/models/qwen2/qwen2.h>

namespace lockstep::models {

namespace {

template <typename Model>
std::shared_ptr<LanguageModel> made(const ModelConfig& config, std::uint64_t seed) {
  return std::make_shared<Model>(config, seed);
}

// Makes the modules of the families in spec/registry.cpp.
struct Makers {
  std::mutex mutex;
  std::map<std::string, ModelMaker> by_family = {
      {"gpt2", made<Gpt>}, {"llama", made<Llama>}, {"qwen2", made<Qwen2>}};
};

Makers& makers() {
  static Makers all;
  return all;
}

ModelMaker maker_of(const std::string& family) {
  Makers& all = makers();
  const std::lock_guard lock(all.mutex);
  const auto found = all.by_family.find(family);
  if (found == all.by_family.end())
    throw UsageError("the model family \"{}\" has no module here: models::register_family() adds a "
                     "family with its module",
                     family);
  return found->second;
}

// Checks that the module's parameters are those of the family's list of layers, which planners and
// checkpoints use.
void check_layers(const LanguageModel& model) {
  auto expected = parameter_shapes(model.config());
  for (const auto& item : model.named_parameters()) {
    const auto found = expected.find(item.key());
    if (found == expected.end() || item.value().sizes() != found->second)
      throw UsageError("the module of the model family \"{}\" has a parameter '{}' of {}, and its "
                       "layers have {}: make them the same",
                       model.config().family, item.key(), c10::str(item.value().sizes()),
                       found == expected.end() ? std::string("none of that name")
                                               : c10::str(at::IntArrayRef(found->second)));
    expected.erase(found);
  }
  if (!expected.empty())
    throw UsageError(
        "the layers of the model family \"{}\" have {} parameters that its module does "
        "not have, such as '{}': make them the same",
        model.config().family, expected.size(), expected.begin()->first);
}

}  // namespace

std::shared_ptr<LanguageModel> make_model(const ModelConfig& config, std::uint64_t seed) {
  const ModelConfig whole = resolved(config);
  const auto model = maker_of(whole.family)(whole, seed);
  check_layers(*model);
  initialise(*model, model->config(), seed);
  return model;
}

void register_family(Family family, ModelMaker make) {
  if (make == nullptr)
    throw UsageError("the model family \"{}\" has no module: give a function that makes one",
                     family.name);
  const std::string name = family.name;
  add_family(std::move(family));
  Makers& all = makers();
  const std::lock_guard lock(all.mutex);
  all.by_family.emplace(name, std::move(make));
}

}  // namespace lockstep::models
