// GPT-2 without LibTorch.
#pragma once

#include <lockstep/models/spec/family.h>

namespace lockstep::models {

Family gpt2();

}  // namespace lockstep::models
