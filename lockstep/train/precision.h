// In which type of numbers a config computes.
#pragma once

#include <optional>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <lockstep/train/config.h>

namespace lockstep::train {

// Nothing for fp32, which is what weights are.
std::optional<c10::ScalarType> scalar_type_of(Precision precision);

// What operators compute in while weights stay what they are: where gradients are whole, weights
// are too, and 16 bits are autocast's; where they are cut, 16 bits are the strategy's. CPUs compute
// in what weights are.
std::optional<c10::ScalarType> autocast_of(const TrainConfig& config, c10::Device device);

}  // namespace lockstep::train
