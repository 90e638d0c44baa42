#include <lockstep/models/initial_weights.h>

#include <cmath>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/nn/layers/random.h>

namespace lockstep::models {

namespace {

bool is_norm(std::string_view parameter) {
  for (const char* end : {".ln_1.weight", ".ln_2.weight", ".ln_f.weight", "norm.weight"})
    if (parameter.ends_with(end)) return true;
  return false;
}

}  // namespace

InitialWeight initial_weight(const ModelConfig& config, std::string_view parameter) {
  constexpr double kStd = 0.02;
  if (parameter.ends_with(".bias")) return {InitialWeight::Kind::zeros};
  if (is_norm(parameter)) return {InitialWeight::Kind::ones};
  if (config.family == Family::gpt2 && parameter.ends_with(".c_proj.weight"))
    return {InitialWeight::Kind::normal,
            kStd / std::sqrt(2.0 * static_cast<double>(config.num_layers))};
  return {InitialWeight::Kind::normal, kStd};
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
