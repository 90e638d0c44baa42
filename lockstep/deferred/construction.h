// Builds a model that is too large for this machine's memory: its tensors take no memory until
// their values are asked for, a few at a time.
//
//   Construction construction;
//   auto model = construction.construct([] { return MyNet(); });
//   for (Unit& unit : units) {
//     const auto values = construction.materialise(unit.parameters);
//     unit.take_over(…);       // copies them, and calls set_data on the parameters
//   }                          // the memory is given back
//   construction.keep(model->buffers());
//   construction.keep_all();   // tensors that the model did not register
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>

#include <ATen/core/Tensor.h>

namespace lockstep::deferred {

class Hold;
class Recorder;

struct ConstructionOptions {
  // Smaller tensors are made as usual, because deferring them would cost more than it saves.
  std::size_t smallest_bytes = 64 << 10;
};

// Keeps the values of some tensors in their memory while it lives. It keeps the parts of the
// Construction that it needs alive.
class Materialised {
 public:
  explicit Materialised(std::unique_ptr<Hold> hold);
  ~Materialised();
  Materialised(Materialised&&) noexcept;
  Materialised& operator=(Materialised&&) noexcept;

 private:
  std::unique_ptr<Hold> hold_;
};

// Runs constructors, but records the operators that they call on tensors instead of running them.
// Operators run later, for the tensors whose values are asked for, in any order: every bit is as
// plain construction would have made it. Generators are advanced at once and not touched later.
//
// A deferred tensor looks like any other of the CPU: it has a shape, strides, a type and a data
// pointer that stays the same. But there is nothing at that pointer: code that reads it without an
// operator, such as pickle_save, finds zeros, and torch::save refuses the tensor. Operators may be
// called at any time and on any thread. They find the values that they need, which are computed
// anew each time: materialise or keep a tensor before you use it often. A memory is freed with its
// last tensor, for example when set_data() gives a parameter other memory.
//
// These tensors are made as usual: tensors of other devices (CUDA), small and pinned ones, those in
// memory formats other than contiguous, those that other threads make, and results of operators
// that take no deferred tensor. An operator that changes a deferred tensor in a way that cannot be
// deferred (it resizes the tensor, autograd records it, its random numbers depend on a tensor)
// makes it an ordinary one at once. If the system gives no addresses without memory, a warning says
// so and tensors are made as usual from then on.
//
// Tensors that are not deferred are copied if a deferred operator reads them.
//
// Threading: construct() defers the tensors that its own thread makes. All members may be called
// from any thread. Two Constructions are independent; an operator may take tensors of both.
class Construction {
 public:
  explicit Construction(ConstructionOptions options = {});
  ~Construction();
  Construction(Construction&&) noexcept;
  Construction& operator=(Construction&&) noexcept;

  // Calls make() and returns its result. May be called several times.
  //
  // Failure: throws make()'s exception; everything is then as it was before, except generators.
  // UsageError inside another construct() on the same thread. UsageError after make() has returned,
  // if it read or wrote deferred values through a pointer (data_ptr, accessor), even if the tensor
  // is gone since; if two constructors run at once, both may throw. Pointers may be used while
  // nothing was written to the tensor, while it is all zeros (zeros, full with 0, copies of these),
  // and while its values are there: when it is materialised or an ordinary tensor.
  template <typename Make>
  auto construct(Make&& make) {
    using Made = std::decay_t<std::invoke_result_t<Make>>;
    std::optional<Made> made;
    run([&] { made.emplace(std::invoke(std::forward<Make>(make))); });
    return Made(std::move(*made));
  }

  // Whether the tensor's values are deferred. This stays true while they are materialised.
  bool is_deferred(const at::Tensor& tensor) const;

  // Computes the values of these tensors and of all tensors that share memory with them. Tensors
  // that are not deferred may be among them. Operators that write to them meanwhile are remembered
  // for the next materialise(); writes through pointers are lost.
  //
  // Failure: an operator's exception; std::bad_alloc.
  [[nodiscard]] Materialised materialise(std::span<const at::Tensor> tensors);

  // Computes the values for good: the tensors are ordinary ones from now on.
  void keep(std::span<const at::Tensor> tensors);
  // The same for all tensors that are still deferred and alive.
  void keep_all();

  // The memory of materialised and kept values, and of intermediate results while they are
  // computed.
  std::size_t bytes() const;
  std::size_t peak_bytes() const;

 private:
  void run(const std::function<void()>& make);

  std::shared_ptr<Recorder> recorder_;
};

}  // namespace lockstep::deferred
