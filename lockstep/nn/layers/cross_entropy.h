// The loss of a language model, as a sum and a count: a mean is taken over the targets of all
// ranks, never over those of one.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include <ATen/core/Tensor.h>

namespace lockstep::nn {

class TensorAxis;

struct LossSum {
  at::Tensor sum;          // a scalar: the loss of every valid target, added in the order of rows
  std::int64_t count = 0;  // of valid targets
};

inline constexpr std::int64_t kIgnoredTarget = -100;

// Targets of a loss (int64), on the device that computes it. Where somebody has the same in the
// host's memory, they are checked and counted there, and the host need not wait for the device.
struct Targets {
  at::Tensor tensor;
  at::Tensor on_host;  // or undefined

  Targets(at::Tensor targets) : tensor(std::move(targets)) {}  // NOLINT: every tensor of targets is
  Targets(at::Tensor targets, at::Tensor same_on_host)
      : tensor(std::move(targets)), on_host(std::move(same_on_host)) {}
};

// Cross-entropy of logits [rows, vocab] against targets [rows]. Rows whose target is
// `ignore_index` count nothing and get no gradient; any other target outside the vocabulary is a
// UsageError. The only tensor as large as the logits that it makes is their gradient.
LossSum cross_entropy(const at::Tensor& logits, const Targets& targets,
                      std::int64_t ignore_index = kIgnoredTarget);

// The same of logits = hidden·weightᵀ, hidden [rows, width] and weight [vocab, width], of which
// there is never more than a block of rows. Where a gradient will be asked for, it is computed
// along with the loss.
LossSum linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                             const Targets& targets, std::int64_t ignore_index = kIgnoredTarget);

// Which rows of a weight [vocabulary, width] a rank has.
struct VocabularyPart {
  std::int64_t begin = 0;
  std::int64_t vocabulary = 0;
};

// linear_cross_entropy() of a weight that is cut by vocabulary over a tensor axis. hidden and
// targets are the same on every rank, and so is the loss. No logit leaves its rank: ranks exchange
// three numbers a row. The gradient of hidden is that of this rank's rows alone: enter_products()
// (in tensor_moves.h) sums it over the ranks.
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

// The number of `targets` that are not to be ignored. UsageError where they are not int64 [rows] or
// one is outside the vocabulary. Waits for the device that holds them where they are not on the
// host, too.
std::int64_t count_targets(const char* function, const Targets& targets, const TargetShape& shape);

}  // namespace lockstep::nn::internal
