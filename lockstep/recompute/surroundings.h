// The state besides its inputs that a function finds when it is called: autocast, random number
// generators and the buffers of a module. It is taken in the first run and restored for the second.
#pragma once

#include <array>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

namespace lockstep::activations {

// A thread's autocast of the CPU and of CUDA.
class AutocastState {
 public:
  static AutocastState now();

  void set() const;

 private:
  struct DeviceState {
    c10::DeviceType device{};
    bool enabled = false;
    c10::ScalarType dtype{};
  };

  std::array<DeviceState, 2> devices_;
  bool cache_enabled_ = false;
};

// Sets a state while it lives, as a scope of autocast: the casts of weights made in it are dropped
// at its end, unless it is within another scope.
class AutocastScope {
 public:
  explicit AutocastScope(const AutocastState& state);
  ~AutocastScope();
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

 private:
  AutocastState before_;
};

// The values of a module's buffers. Its forward may change them, as batch norm changes its running
// statistics. They are copied before the first run and restored for the second, which then leaves
// no trace.
class BufferValues {
 public:
  BufferValues() = default;
  explicit BufferValues(const std::vector<at::Tensor>& buffers);

  // Drops the copies of large buffers that have not changed, such as tables of constants. Small
  // ones are not compared, because that would wait for a GPU.
  void drop_unchanged();

  // The current values of the same buffers.
  BufferValues now() const;

  // Writes the values behind autograd's back, so that it sees no change.
  void restore() const;

 private:
  struct Value {
    at::Tensor buffer;
    at::Tensor copy;
  };
  std::vector<Value> values_;
};

// The states of the global random number generators: the CPU's, and that of each GPU that this
// process uses. Taking and restoring them runs on the host and waits for no device. Threading:
// holds each generator's mutex while it accesses it; numbers that other threads draw between taking
// a state and restoring it are drawn again.
class GeneratorStates {
 public:
  static GeneratorStates now();

  void restore() const;

 private:
  struct State {
    at::Generator generator;
    at::Tensor value;
  };
  std::vector<State> states_;
};

}  // namespace lockstep::activations
