// The advice for a user whose device is too small.
#pragma once

#include <exception>
#include <string>

#include <lockstep/train/config/config.h>

namespace lockstep::train {

// Whether the host or a GPU is out of memory, in any of LibTorch's wordings.
bool is_out_of_memory(const std::exception& error);

// Says how much memory was requested and which settings to make smaller, with the config's numbers.
std::string out_of_memory_advice(const TrainConfig& config, const std::exception& error);

}  // namespace lockstep::train
