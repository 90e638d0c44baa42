// Which operators autocast computes in 16 bits, and in which.
#pragma once

#include <array>

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

namespace lockstep::activations {

// A thread's autocast of the CPU and of CUDA.
class AutocastState {
 public:
  static AutocastState now();

  void set() const;

 private:
  struct OfDevice {
    c10::DeviceType device{};
    bool enabled = false;
    c10::ScalarType dtype{};
  };

  std::array<OfDevice, 2> devices_;
  bool cache_enabled_ = false;
};

// Sets a state while it lives, as a scope of autocast of its own: casts of weights that are made in
// it are forgotten at its end, unless it is in another scope.
class AutocastScope {
 public:
  explicit AutocastScope(const AutocastState& state);
  ~AutocastScope();
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

 private:
  AutocastState before_;
};

}  // namespace lockstep::activations
