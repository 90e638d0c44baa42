// The loss of a language model's head.
#pragma once

#include <cstdint>

#include <ATen/ATen.h>

namespace lockstep::nn {

struct LossSum {
  at::Tensor sum;
  std::int64_t count = 0;  // targets that are not negative
};

// Cross-entropy of hidden [rows, width] times weight [vocab, width] against targets [rows], summed
// over the targets that are not negative.
inline LossSum linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                    const at::Tensor& targets) {
  const auto valid = targets.ge(0);
  const auto losses = -at::linear(hidden, weight)
                           .log_softmax(-1)
                           .gather(1, targets.clamp_min(0).unsqueeze(1))
                           .squeeze(1);
  return {losses.masked_fill(valid.logical_not(), 0).sum(), valid.sum().item<std::int64_t>()};
}

}  // namespace lockstep::nn
