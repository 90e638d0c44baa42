// Cuts an epoch into steps, and a step into the batches whose gradients are accumulated. A plan, a
// loader and a trainer all count steps with this struct, so that they agree.
#pragma once

#include <algorithm>
#include <cstdint>

namespace lockstep::data {

struct StepCut {
  std::int64_t samples_per_step = 1;   // of all ranks together
  std::int64_t samples_per_batch = 1;  // likewise; the last batch of a step has what is left
  // Leaves out a last step that has fewer samples than the others.
  bool drop_last = false;

  std::int64_t batches_per_step() const { return parts(samples_per_step, samples_per_batch); }

  // How many of `num_samples` are used: the samples of an epoch, or those from the start of a step
  // on.
  std::int64_t num_used(std::int64_t num_samples) const {
    return drop_last ? num_samples / samples_per_step * samples_per_step : num_samples;
  }

  // How many steps and batches `num_used` samples make, all of which are used.
  std::int64_t num_steps(std::int64_t num_used) const { return parts(num_used, samples_per_step); }
  std::int64_t num_batches(std::int64_t num_used) const {
    return num_used / samples_per_step * batches_per_step() +
           parts(num_used % samples_per_step, samples_per_batch);
  }

  // Batches are numbered from the start of a step on, where sample 0 is.
  std::int64_t first_of(std::int64_t batch) const {
    return batch / batches_per_step() * samples_per_step +
           batch % batches_per_step() * samples_per_batch;
  }
  std::int64_t size_of(std::int64_t batch, std::int64_t num_used) const {
    const std::int64_t before = batch % batches_per_step() * samples_per_batch;
    return std::min({samples_per_batch, samples_per_step - before, num_used - first_of(batch)});
  }

 private:
  // No sum of the two: one may be as large as numbers get.
  static std::int64_t parts(std::int64_t whole, std::int64_t part) {
    return whole / part + (whole % part != 0 ? 1 : 0);
  }
};

}  // namespace lockstep::data
