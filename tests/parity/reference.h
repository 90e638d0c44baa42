// What one process computes: each rank's share of the batch after the other, added in the
// canonical order.
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

// How one step's samples are spread: batches[rank][pass] is how many samples that rank has in that
// pass (micro-batch).
struct Spread {
  std::vector<std::vector<std::int64_t>> batches;

  int num_ranks() const { return static_cast<int>(batches.size()); }
  std::int64_t num_passes() const { return static_cast<std::int64_t>(batches[0].size()); }
  std::int64_t num_samples() const;
  // The first sample of a rank's pass in the whole batch.
  std::int64_t first(int rank, std::int64_t pass) const;
};

// How many samples a rank has in a pass.
using SamplesOf = std::function<std::int64_t(int rank, std::int64_t step, std::int64_t pass)>;

// At least one sample is somewhere, also for one rank.
Spread spread_of(const SamplesOf& samples, std::int64_t num_passes, int num_ranks,
                 std::int64_t step);

// What the sum of gradients is divided by.
enum class Division {
  by_ranks,  // after each rank has taken the mean over its samples
  by_count,
};

// Makes dropout and the like draw the same in the process that stands in for a rank as in that
// rank.
void seed_pass(std::int64_t step, int rank, std::int64_t pass);

// The loss that a rank calls backward() on: a sum for by_count, otherwise a mean over its samples
// of all passes.
at::Tensor pass_loss(const Subject& subject, const at::Tensor& input, const at::Tensor& target,
                     const Spread& spread, int rank, std::int64_t pass, Division division);

// Puts the gradients of a step into the subject's parameters, and returns the sum of all losses
// that the ranks' backward passes started from.
double reference_step(const Subject& subject, const at::Tensor& input, const at::Tensor& target,
                      std::int64_t step, const Spread& spread, Division division);

// The whole batch in one pass, divided by its count: no spreading at all. Returns the loss.
double whole_batch_step(const Subject& subject, const at::Tensor& input, const at::Tensor& target);

}  // namespace lockstep::parity
