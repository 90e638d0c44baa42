#include <lockstep/recompute/keep_results.h>

#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <lockstep/base/error.h>

namespace lockstep {

namespace activations {

namespace {

// A mode above autograd and autocast that LibTorch itself does not use.
constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

thread_local ResultKeeper* keeper_here = nullptr;
thread_local OperationKinds kinds_here;

// Of an operator with one result.
template <OperationKind kKind>
void call(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard below(kKey);
  ResultKeeper* const keeper = keeper_here;
  if (keeper == nullptr || !keeper->keeps(kKind)) {
    op.callBoxed(stack);
    return;
  }
  const std::size_t count = op.schema().arguments().size();
  std::vector<at::Tensor> arguments;
  for (const c10::IValue& value : torch::jit::last(*stack, count))
    if (value.isTensor()) arguments.push_back(value.toTensor());
  torch::jit::Stack own = torch::jit::pop(*stack, count);
  torch::jit::push(*stack, keeper->result(kKind, arguments, [&] {
    op.callBoxed(own);
    return torch::jit::pop(own).toTensor();
  }));
}

void register_functions() {
  auto& dispatcher = c10::Dispatcher::singleton();
  if (dispatcher.hasBackendFallbackForDispatchKey(kKey))
    throw UsageError(
        "another library of this process has functions of its own under LibTorch's dispatch key "
        "{}, by which Lockstep keeps results of operations: do without that library, or without "
        "KeepResults",
        c10::toString(kKey));
  // Never unregistered: threads may compute until the process ends.
  auto* const others = new torch::Library(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
  others->fallback(torch::CppFunction::makeFallthrough());
  auto* const ours = new torch::Library(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
  const auto add = [&](const char* name, auto function) {
    // Some came with later versions.
    if (dispatcher.findOp({fmt::format("aten::{}", name), ""})) ours->impl(name, function());
  };
  for (const char* name : {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm"})
    add(name, [] {
      return torch::CppFunction::makeFromBoxedFunction<&call<OperationKind::matrix_product>>();
    });
  for (const char* name : {"conv1d", "conv2d", "conv3d", "convolution"})
    add(name, [] {
      return torch::CppFunction::makeFromBoxedFunction<&call<OperationKind::convolution>>();
    });
  add("scaled_dot_product_attention",
      [] { return torch::CppFunction::makeFromBoxedFunction<&call<OperationKind::attention>>(); });
}

}  // namespace

KeeperScope::KeeperScope(ResultKeeper* keeper)
    : outer_(keeper_here), outer_included_(c10::impl::tls_is_dispatch_key_included(kKey)) {
  if (keeper != nullptr) {
    static const bool registered = [] {
      register_functions();
      return true;
    }();
    c10::impl::tls_set_dispatch_key_included(kKey, registered);
  }
  keeper_here = keeper;
}

KeeperScope::~KeeperScope() {
  keeper_here = outer_;
  c10::impl::tls_set_dispatch_key_included(kKey, outer_included_);
}

ResultKeeper* current_keeper() { return keeper_here; }

const OperationKinds& kept_kinds() { return kinds_here; }

}  // namespace activations

KeepResults::KeepResults(activations::OperationKinds kinds)
    : outer_(std::exchange(activations::kinds_here, std::move(kinds))) {}

KeepResults::~KeepResults() { activations::kinds_here = std::move(outer_); }

}  // namespace lockstep
