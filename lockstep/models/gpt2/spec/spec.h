// The description of GPT-2 that needs no LibTorch.
#pragma once

#include <lockstep/models/spec/family.h>

namespace lockstep::models {

Family gpt2();

}  // namespace lockstep::models
