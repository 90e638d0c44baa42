// Gradient accumulation: what ranks exchange before the last pass of a step.
#pragma once

#include <functional>
#include <memory>
#include <utility>

namespace lockstep::data_parallel {

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
