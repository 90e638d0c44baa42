// Builds a model whose tensors take no memory until their values are asked for, a few at a time: a
// model that fits nowhere as a whole.
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
  // Tensors that would take less memory are made as ever: deferring them would cost more than it
  // saves.
  std::size_t smallest_bytes = 64 << 10;
};

// The values of some tensors, where the tensors lie, for as long as this is there. It keeps what it
// needs of the Construction alive.
class Materialised {
 public:
  explicit Materialised(std::unique_ptr<Hold> hold);
  ~Materialised();
  Materialised(Materialised&&) noexcept;
  Materialised& operator=(Materialised&&) noexcept;

 private:
  std::unique_ptr<Hold> hold_;
};

// Runs constructors, remembers what they do to tensors instead of doing it, and does it later for
// the tensors that are asked for, in any order and for any of them: every bit is as plain
// construction would have made it. Generators are moved on at once and are not touched later.
//
// A deferred tensor looks like any other of the CPU: shape, strides, type and a data pointer that
// stays the same. But there is nothing at that pointer, and what goes there without an operator, as
// pickle_save, finds zeros; torch::save is refused. Operators may be called at any time and on any
// thread; they find the values they need, which are computed anew each time: materialise or keep a
// tensor before it is used in earnest. A memory whose last tensor goes, as when set_data() puts a
// parameter elsewhere, goes too.
//
// What is made as ever: tensors of other devices (CUDA's), small ones, pinned ones, ones in memory
// formats other than contiguous, those that other threads make than the one that constructs, and
// the results of operators that take no deferred tensor. An operator that changes a deferred tensor
// in a way that cannot be put off (it resizes it, autograd records it, its random numbers depend on
// a tensor) makes it an ordinary one at once. Where the system has no addresses to give without
// memory for them, a warning says so and tensors are made as ever from there on.
//
// Copies of tensors that are not deferred are kept where operators read them that are put off.
//
// Threading: construct() defers what its own thread makes. All members may be called from any
// thread. Two Constructions know nothing of each other; tensors of both may meet in an operator.
class Construction {
 public:
  explicit Construction(ConstructionOptions options = {});
  ~Construction();
  Construction(Construction&&) noexcept;
  Construction& operator=(Construction&&) noexcept;

  // Calls make() and returns what it returned. May be called several times.
  //
  // Failure: what make() throws, after which all is as it was before, but for generators.
  // UsageError inside of another construct() on the same thread, and, when make() has returned,
  // where it read or wrote values through a pointer (data_ptr, accessor) which had been put off,
  // whatever has become of the tensor since; of two constructors at once, both may hear of it. To
  // read or write a tensor through a pointer is fine while nothing happened to it yet, while it is
  // all zeros (zeros, full with 0, copies of such), and where its values are there: while
  // materialised, and once it is an ordinary one.
  template <typename Make>
  auto construct(Make&& make) {
    using Made = std::decay_t<std::invoke_result_t<Make>>;
    std::optional<Made> made;
    run([&] { made.emplace(std::invoke(std::forward<Make>(make))); });
    return Made(std::move(*made));
  }

  // Whether operators on this tensor would have to compute its values first; also true while they
  // are materialised.
  bool is_deferred(const at::Tensor& tensor) const;

  // Computes the values of these tensors and of all that share memory with them. Tensors that are
  // not deferred may be among them. What is written to them meanwhile with operators is there when
  // they are materialised again; what is written through pointers is not.
  //
  // Failure: what an operator throws; std::bad_alloc.
  [[nodiscard]] Materialised materialise(std::span<const at::Tensor> tensors);

  // The same for good: they are ordinary tensors from here on.
  void keep(std::span<const at::Tensor> tensors);
  // The same for whatever is still deferred and referred to.
  void keep_all();

  // The memory that values take, materialised or kept, and what computing them needs besides.
  std::size_t bytes() const;
  std::size_t peak_bytes() const;

 private:
  void run(const std::function<void()>& make);

  std::shared_ptr<Recorder> recorder_;
};

}  // namespace lockstep::deferred
