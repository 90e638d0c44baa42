// Gradient accumulation without communication.
#pragma once

#include <functional>
#include <memory>
#include <utility>

namespace lockstep::data_parallel {

// While one of these lives, backward passes leave their gradients on the rank, to be exchanged with
// those of the next pass without it.
class [[nodiscard]] NoSync {
 public:
  // `Exchanger` sums gradients over ranks where set_exchange() lets it.
  template <typename Exchanger>
  explicit NoSync(std::shared_ptr<Exchanger> exchanger) {
    const bool before = exchanger->exchange();
    exchanger->set_exchange(false);
    restore_ = [exchanger = std::move(exchanger), before] { exchanger->set_exchange(before); };
  }
  NoSync(NoSync&& other) noexcept : restore_(std::exchange(other.restore_, nullptr)) {}
  NoSync& operator=(NoSync&&) = delete;
  ~NoSync() {
    if (restore_) restore_();
  }

 private:
  std::function<void()> restore_;
};

}  // namespace lockstep::data_parallel
