// While a scope of this thread's lasts, the operators that make tensors come to us.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <lockstep/intercept/mode.h>

namespace lockstep::deferred {

// Makes tensors in LibTorch's stead.
class Factory {
 public:
  virtual ~Factory() = default;

  // An uninitialised tensor of the CPU. Undefined leaves it to LibTorch.
  virtual at::Tensor make(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) = 0;
};

// Factories of this thread lead to `factory`, which outlives the scope, when they are called by the
// program or by an operator that is made of others. Kernels that take memory for themselves to
// write to do not. Factories of other threads, of other devices, of pinned memory and of memory
// formats other than contiguous do not either.
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

// Within this one, and so within a scope, factories are LibTorch's.
class PlainFactories {
 private:
  c10::impl::ExcludeDispatchKeyGuard excluded_{intercept::kMode};
};

}  // namespace lockstep::deferred
