// Scopes of a thread: in one, the operators that make tensors come to us; in another, operators see
// memory as it is.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <lockstep/intercept/mode.h>
#include <lockstep/intercept/owner.h>

namespace lockstep::deferred {

// Makes tensors in place of LibTorch.
class Factory {
 public:
  virtual ~Factory() = default;

  // Returns an uninitialised tensor of the CPU, or an undefined one to leave it to LibTorch.
  virtual at::Tensor make(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) = 0;
};

// While it lives, operators of this thread that make tensors lead to `factory`, which outlives the
// scope, if the program calls them or an operator that is made of others. These do not: kernels
// that allocate memory to write to; other threads; tensors of other devices, in pinned memory, or
// in memory formats other than contiguous.
//
// Failure: UsageError where the thread is in such a scope already; as ModeScope.
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

// While it lives, tensors are made by LibTorch, even within a FactoryScope.
class PlainFactories {
 private:
  c10::impl::ExcludeDispatchKeyGuard excluded_{intercept::kMode};
};

// While it lives, operators of this thread see memory as it is: no factory of ours and no owner of
// a tensor hears of them, and neither autograd nor autocast takes part.
class AsIs {
 private:
  c10::impl::ExcludeDispatchKeyGuard below_{
      c10::DispatchKeySet({intercept::kMode, intercept::kKey}) | c10::autocast_dispatch_keyset};
  c10::NoGradGuard no_grad_;
};

}  // namespace lockstep::deferred
