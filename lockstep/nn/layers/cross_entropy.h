// The loss of a language model, as a sum and a count: the mean is taken over the targets of all
// ranks, never over those of one.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include <ATen/core/Tensor.h>

namespace lockstep::nn {

class TensorAxis;

struct LossSum {
  at::Tensor sum;          // a scalar: the losses of all valid targets, added in the order of rows
  std::int64_t count = 0;  // number of valid targets
};

inline constexpr std::int64_t kIgnoredTarget = -100;

// The targets of a loss (int64), on the device that computes it. If the caller also has them in the
// host's memory, they are checked and counted there, and the host need not wait for the device.
struct Targets {
  at::Tensor tensor;
  at::Tensor on_host;  // may be undefined

  Targets(at::Tensor targets) : tensor(std::move(targets)) {}  // NOLINT: every tensor of targets is
  Targets(at::Tensor targets, at::Tensor same_on_host)
      : tensor(std::move(targets)), on_host(std::move(same_on_host)) {}
};

// Cross-entropy of logits [rows, vocab] against targets [rows]. Rows whose target is `ignore_index`
// do not count and get no gradient; any other target outside the vocabulary is a UsageError. The
// logits' gradient is the only other tensor of their size that this makes.
LossSum cross_entropy(const at::Tensor& logits, const Targets& targets,
                      std::int64_t ignore_index = kIgnoredTarget);

// The cross-entropy of logits = hidden·weightᵀ, with hidden [rows, width] and weight [vocab,
// width]. Only one block of the logits' rows is in memory at a time. If a gradient will be needed,
// it is computed along with the loss.
LossSum linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                             const Targets& targets, std::int64_t ignore_index = kIgnoredTarget);

// The rows of a weight [vocabulary, width] that a rank has.
struct VocabularyPart {
  std::int64_t begin = 0;
  std::int64_t vocabulary = 0;
};

// linear_cross_entropy() of a weight that is cut by vocabulary over a tensor axis. hidden and
// targets are the same on every rank, and so is the loss. Ranks exchange three numbers for each row
// instead of its logits. A rank's gradient of hidden is that of its own rows of the weight:
// enter_products() (in tensor_moves.h) sums it over the ranks.
LossSum vocab_parallel_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                     const Targets& targets, const VocabularyPart& part,
                                     const std::shared_ptr<TensorAxis>& axis,
                                     std::int64_t ignore_index = kIgnoredTarget);

}  // namespace lockstep::nn

namespace lockstep::nn::internal {

struct TargetShape {
  std::int64_t rows = 0;
  std::int64_t vocabulary = 0;
  std::int64_t ignore_index = 0;
};

// The number of `targets` that are not ignored. UsageError if they are not int64 [rows], or if one
// is outside the vocabulary. Waits for their device unless they are also on the host.
std::int64_t count_targets(const char* function, const Targets& targets, const TargetShape& shape);

}  // namespace lockstep::nn::internal
