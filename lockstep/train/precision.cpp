#include <lockstep/train/precision.h>

namespace lockstep::train {

std::optional<c10::ScalarType> scalar_type_of(Precision precision) {
  switch (precision) {
    case Precision::fp32: return std::nullopt;
    case Precision::bf16: return c10::kBFloat16;
    case Precision::fp16: return c10::kHalf;
  }
  return std::nullopt;
}

std::optional<c10::ScalarType> autocast_of(const TrainConfig& config, c10::Device device) {
  if (device.is_cpu() || cuts_gradients(config.sharding.strategy)) return std::nullopt;
  return scalar_type_of(config.precision.compute);
}

}  // namespace lockstep::train
