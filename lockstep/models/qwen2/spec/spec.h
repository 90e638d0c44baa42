// The description of Qwen2 that needs no LibTorch.
#pragma once

#include <lockstep/models/spec/family.h>

namespace lockstep::models {

Family qwen2();

}  // namespace lockstep::models
