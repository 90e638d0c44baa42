// Answers about a model that is spread over ranks: the totals of a step, its memory, and how its
// state is handed out.
#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

namespace lockstep::data_parallel {

// The sum of the ranks' losses in one step. It is on the GPU where the parameters are: reading a
// number of it waits for the GPU.
struct StepTotals {
  at::Tensor values;  // [2] of float64: the samples (or tokens) of all ranks, and their summed loss

  double count() const;
  double mean_loss() const;
};

// How whole tensors are handed out.
struct StateDictOptions {
  bool offload_to_cpu = true;
  bool rank0_only = true;  // otherwise every rank gets all of it
};

// The memory that a model takes on a rank, counted where it is taken.
struct MemoryReport {
  std::int64_t num_parameters = 0;  // of the whole model
  int num_ranks = 1;                // that hold one copy of it together

  // At rest, in bytes.
  std::int64_t parameters = 0;
  std::int64_t gradients = 0;
  std::int64_t optimizer = 0;
  std::int64_t buffers = 0;

  // Beside it in the host's memory, of what was offloaded: parts, gradients, the optimizer's state.
  std::int64_t on_host = 0;

  // Beyond that while a step runs: gathered units, and gradients on their way.
  std::int64_t gathered_now = 0;
  std::int64_t gathered_peak = 0;
  std::int64_t gradients_on_their_way_peak = 0;

  std::int64_t at_rest() const { return parameters + gradients + optimizer + buffers; }

  // A few lines for people.
  std::string text() const;
};

}  // namespace lockstep::data_parallel
