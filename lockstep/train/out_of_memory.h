// What to tell a user whose device is too small.
#pragma once

#include <exception>
#include <string>

#include <lockstep/train/config/config.h>

namespace lockstep::train {

// Whether the host or a GPU is out of memory, whichever way LibTorch says it.
bool is_out_of_memory(const std::exception& error);

// What was asked for, and what to make smaller, with the config's numbers.
std::string out_of_memory_advice(const TrainConfig& config, const std::exception& error);

}  // namespace lockstep::train
