// What the users of a model that is spread over ranks hold in their hands: guards of gradient
// accumulation, the totals of a step, its memory, and how its state is handed out.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

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

namespace internal {

// Changes a setting of an exchange of gradients for as long as it lives.
class [[nodiscard]] PassGuard {
 public:
  explicit PassGuard(std::function<void()> restore) : restore_(std::move(restore)) {}
  PassGuard(PassGuard&& other) noexcept : restore_(std::exchange(other.restore_, nullptr)) {}
  PassGuard& operator=(PassGuard&&) = delete;
  ~PassGuard() {
    if (restore_) restore_();
  }

 private:
  std::function<void()> restore_;
};

}  // namespace internal

// While one of these lives, backward passes leave their gradients on the rank, to be exchanged with
// those of the next pass without it.
class [[nodiscard]] NoSync : public internal::PassGuard {
 public:
  // `Exchanger` sums gradients over ranks where set_exchange() lets it.
  template <typename Exchanger>
  explicit NoSync(std::shared_ptr<Exchanger> exchanger)
      : PassGuard([exchanger, before = exchanger->exchange_is_on()] {
          exchanger->set_exchange(before);
        }) {
    exchanger->set_exchange(false);
  }
};

// While one of these lives, further passes of the step follow: gradients are divided by the samples
// of all passes after the last one, which comes without it.
class [[nodiscard]] Accumulation : public internal::PassGuard {
 public:
  template <typename Exchanger>
  explicit Accumulation(std::shared_ptr<Exchanger> exchanger)
      : PassGuard([exchanger, before = exchanger->more_passes()] {
          exchanger->set_more_passes(before);
        }) {
    exchanger->set_more_passes(true);
  }
};

}  // namespace lockstep::data_parallel
