// Fits what was saved to what is needed.
#pragma once

#include <vector>

#include <lockstep/optim/parameter.h>

namespace lockstep::optim {

// For each of `needed` the tensor of its name in `saved`. UsageError, with the differences, unless
// the names are the same ones and each tensor is of the needed shape and type.
std::vector<at::Tensor> match_saved_state(const std::vector<NamedTensor>& needed,
                                          const std::vector<NamedTensor>& saved);

}  // namespace lockstep::optim
