// Scopes of a thread: in a FactoryScope, we make the tensors; in an AsIs scope, operators see
// memory directly.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <lockstep/intercept/mode.h>
#include <lockstep/intercept/owner.h>

namespace lockstep::deferred {

// Makes tensors in LibTorch's place.
class Factory {
 public:
  virtual ~Factory() = default;

  // Returns an uninitialised tensor of the CPU, or an undefined one to leave it to LibTorch.
  virtual at::Tensor make(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) = 0;
};

// While it lives, operators of this thread that make tensors call `factory`, which outlives the
// scope, if the program calls them or an operator that is composed of them. Exceptions are kernels
// that allocate memory to write to, other threads, and tensors of other devices, in pinned memory,
// or in memory formats other than contiguous.
//
// Failure: UsageError if the thread is in such a scope already; otherwise as ModeScope.
class FactoryScope : private intercept::Listener {
 public:
  explicit FactoryScope(Factory& factory);
  ~FactoryScope() override;
  FactoryScope(const FactoryScope&) = delete;
  FactoryScope& operator=(const FactoryScope&) = delete;

  // The factory of the scope that this thread is in, or null.
  static Factory* current();

 private:
  void on_operator(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack) override;

  intercept::ModeScope mode_;
};

// While it lives, LibTorch makes tensors, even within a FactoryScope.
class PlainFactories {
 private:
  c10::impl::ExcludeDispatchKeyGuard excluded_{intercept::kMode};
};

// While it lives, operators of this thread see memory directly: neither our factories nor the
// owners of tensors are called, and neither autograd nor autocast takes part.
class AsIs {
 private:
  c10::impl::ExcludeDispatchKeyGuard below_{
      c10::DispatchKeySet({intercept::kMode, intercept::kKey}) | c10::autocast_dispatch_keyset};
  c10::NoGradGuard no_grad_;
};

}  // namespace lockstep::deferred
