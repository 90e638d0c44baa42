#include <lockstep/recompute/keep_results.h>

#include <string>
#include <unordered_map>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace lockstep {

namespace activations {

namespace {

thread_local ResultKeeper* keeper_here = nullptr;
thread_local OperationKinds kinds_here;

// LibTorch's operators of each kind. Each has one result.
const std::unordered_map<std::string, OperationKind>& operator_kinds() {
  static const std::unordered_map<std::string, OperationKind> kinds = {
      {"aten::linear", OperationKind::matrix_product},
      {"aten::matmul", OperationKind::matrix_product},
      {"aten::mm", OperationKind::matrix_product},
      {"aten::bmm", OperationKind::matrix_product},
      {"aten::addmm", OperationKind::matrix_product},
      {"aten::baddbmm", OperationKind::matrix_product},
      {"aten::conv1d", OperationKind::convolution},
      {"aten::conv2d", OperationKind::convolution},
      {"aten::conv3d", OperationKind::convolution},
      {"aten::convolution", OperationKind::convolution},
      {"aten::scaled_dot_product_attention", OperationKind::attention},
  };
  return kinds;
}

class KeepingListener final : public intercept::Listener {
 public:
  void on_operator(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack) override {
    const c10::OperatorName& name = op.operator_name();
    const auto kind =
        name.overload_name.empty() ? operator_kinds().find(name.name) : operator_kinds().end();
    ResultKeeper* const keeper = keeper_here;
    if (keeper == nullptr || kind == operator_kinds().end() || !keeper->keeps(kind->second)) {
      // Dispatches without a guard, because the operators that this one consists of may have a
      // kind, too.
      op.redispatchBoxed(
          keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, intercept::kMode), stack);
      return;
    }
    const c10::impl::ExcludeDispatchKeyGuard below(intercept::kMode);
    const std::size_t count = op.schema().arguments().size();
    std::vector<at::Tensor> arguments;
    for (const c10::IValue& value : torch::jit::last(*stack, count))
      if (value.isTensor()) arguments.push_back(value.toTensor());
    torch::jit::Stack own = torch::jit::pop(*stack, count);
    torch::jit::push(*stack, keeper->result(kind->second, arguments, [&] {
      op.callBoxed(own);
      return torch::jit::pop(own).toTensor();
    }));
  }
};

KeepingListener& keeping_listener() {
  static KeepingListener* const listener = new KeepingListener;
  return *listener;
}

}  // namespace

KeeperScope::KeeperScope(ResultKeeper* keeper) : outer_(std::exchange(keeper_here, keeper)) {
  if (keeper != nullptr) mode_.emplace(&keeping_listener());
}

KeeperScope::~KeeperScope() { keeper_here = outer_; }

ResultKeeper* current_keeper() { return keeper_here; }

const OperationKinds& kept_kinds() { return kinds_here; }

}  // namespace activations

KeepResults::KeepResults(activations::OperationKinds kinds)
    : outer_(std::exchange(activations::kinds_here, std::move(kinds))) {}

KeepResults::~KeepResults() { activations::kinds_here = std::move(outer_); }

}  // namespace lockstep
