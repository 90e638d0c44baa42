#include <lockstep/models/initial_weights.h>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/base/error.h>
#include <lockstep/models/spec/family.h>
#include <lockstep/nn/layers/random.h>

namespace lockstep::models {

InitialWeight initial_weight(const ModelConfig& config, std::string_view parameter) {
  const auto layer = layer_of(config, parameter);
  if (!layer)
    throw UsageError("no layer of the model family \"{}\" has a parameter '{}': its module and its "
                     "list of layers differ",
                     config.family, parameter);
  if (parameter.ends_with(".bias")) return {InitialWeight::Kind::zeros};
  if (layer->kind == Layer::Kind::norm) return {InitialWeight::Kind::ones};
  return {InitialWeight::Kind::normal, layer->initial_std};
}

void initialise(torch::nn::Module& model, const ModelConfig& config, std::uint64_t seed) {
  const c10::NoGradGuard no_grad;
  for (const auto& item : model.named_parameters()) {
    const auto begins = initial_weight(config, item.key());
    switch (begins.kind) {
      case InitialWeight::Kind::zeros: item.value().zero_(); break;
      case InitialWeight::Kind::ones: item.value().fill_(1.0); break;
      case InitialWeight::Kind::normal:
        nn::fill_normal(item.value(), seed, item.key(), begins.std);
        break;
    }
  }
}

}  // namespace lockstep::models
