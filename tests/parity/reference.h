// The reference that one process computes: each rank's share of the batch after the other, added in
// the canonical order.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "subject.h"

namespace lockstep::parity {

inline constexpr std::int64_t kSteps = 5;

// How one step's samples are spread: batches[rank][pass] is the number of samples of that rank in
// that pass (micro-batch).
struct Spread {
  std::vector<std::vector<std::int64_t>> batches;

  int num_ranks() const { return static_cast<int>(batches.size()); }
  std::int64_t num_passes() const { return static_cast<std::int64_t>(batches[0].size()); }
  std::int64_t num_samples() const;
  // The index of the first sample of a rank's pass in the whole batch.
  std::int64_t first(int rank, std::int64_t pass) const;
};

// The number of samples that a rank has in a pass.
using SamplesOf = std::function<std::int64_t(int rank, std::int64_t step, std::int64_t pass)>;

// At least one rank has a sample, even if there is only one rank.
Spread spread_of(const SamplesOf& samples, std::int64_t num_passes, int num_ranks,
                 std::int64_t step);

// The number by which the sum of gradients is divided.
enum class Division {
  by_ranks,  // each rank has taken the mean over its own samples before
  by_count,
};

// The order in which gradients of several passes are added.
enum class PassOrder {
  passes_first,  // each rank's passes, and then the ranks
  ranks_first,   // the ranks of each pass, and then the passes
};

// Makes dropout and the like draw the same numbers in the reference process as in the rank.
void seed_pass(std::int64_t step, int rank, std::int64_t pass);

// The loss on which a rank calls backward(): a sum for by_count, otherwise a mean over its samples
// of all passes.
at::Tensor pass_loss(const Subject& subject, const at::Tensor& input, const at::Tensor& target,
                     const Spread& spread, int rank, std::int64_t pass, Division division);

// Puts the gradients of a step into the subject's parameters, and returns the sum of the losses
// from which the ranks' backward passes start.
double reference_step(const Subject& subject, const at::Tensor& input, const at::Tensor& target,
                      std::int64_t step, const Spread& spread, Division division,
                      PassOrder order = PassOrder::passes_first);

// Runs the whole batch in one pass, divided by its count, without any spreading. Returns the loss.
double whole_batch_step(const Subject& subject, const at::Tensor& input, const at::Tensor& target);

}  // namespace lockstep::parity
