// What a rank's memory holds of a sharded model, counted where it is taken.
#pragma once

#include <cstdint>
#include <string>

namespace lockstep::shard {

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

}  // namespace lockstep::shard
