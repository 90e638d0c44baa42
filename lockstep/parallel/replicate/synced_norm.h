// The mathematics of a batch norm whose samples are spread over ranks.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

namespace lockstep::replicate {

// Sums a tensor over the ranks, in place; every rank calls it alike.
using SumOverRanks = std::function<void(const at::Tensor& sums)>;

// What aten::batch_norm is given in training, and whose call it is.
struct NormCall {
  std::string name;                      // for errors
  at::Tensor input;                      // [samples, channels, …]: this rank's
  at::Tensor weight, bias;               // [channels] or undefined
  at::Tensor running_mean, running_var;  // [channels], updated where defined
  double momentum = 0;
  double eps = 0;
};

// The batch norm over the samples of all ranks, with autograd; `sum` is kept for backward, which
// calls it once where forward does twice. The output is of the input's type, as LibTorch's is, and
// computed in float where that has 16 bits.
//
// Failure: UsageError, the same on all ranks, where they have fewer than two values per channel
// together; what `sum` throws.
at::Tensor synced_batch_norm(const NormCall& call, std::shared_ptr<const SumOverRanks> sum);

}  // namespace lockstep::replicate
