#include <lockstep/parallel/replicate/batch_norm_owner.h>

#include <algorithm>

#include <ATen/ATen.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/version.h>

#include <lockstep/base/error.h>
#include <lockstep/intercept/owner.h>

namespace lockstep::replicate {

namespace {

// Not a subclass's override: only the flag itself is meant.
void set_training(torch::nn::Module& module, bool on) { module.torch::nn::Module::train(on); }

at::Tensor tensor_or_none(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

bool is_operator(const intercept::Call& call, const char* name, const char* overload) {
  const c10::OperatorName& called = call.op().operator_name();
  return called.name == name && called.overload_name == overload;
}

// One thread at a time runs a batch norm.
class BatchNormOwner final : public intercept::Owner {
 public:
  BatchNormOwner(std::weak_ptr<torch::nn::Module> module, std::string name,
                 std::shared_ptr<const SumOverRanks> sum)
      : module_(std::move(module)), name_(std::move(name)), sum_(std::move(sum)) {}

  // The tensors by which its calls are known; they are not kept alive.
  void recognise(const at::Tensor& passed, const at::Tensor& num_batches) {
    passed_ = passed.unsafeGetTensorImpl();
    num_batches_ = num_batches.defined() ? num_batches.unsafeGetTensorImpl() : nullptr;
  }

  void on_call(intercept::Call& call, std::span<const intercept::Use>) override {
    if (is_operator(call, "aten::batch_norm", ""))
      batch_norm(call);
    else if (is_operator(call, "aten::add_", "Scalar"))
      count_batch(call);
    else
      call.proceed();
  }

 private:
  // aten::add_(self, other, alpha), where self is a batch norm's count of batches: it adds one at
  // the beginning of a forward that trains. LibTorch's module goes on to refuse one value per
  // channel where it trains, though other ranks may have more: until it comes to batch_norm()
  // below, it does not know that it trains.
  void count_batch(intercept::Call& call) {
    const bool ours = call.arguments()[0].toTensor().unsafeGetTensorImpl() == num_batches_;
    call.proceed();
    const auto module = ours ? module_.lock() : nullptr;
    if (module == nullptr || !module->is_training()) return;
    training_hidden_ = true;
    set_training(*module, false);
  }

  // aten::batch_norm(input, weight?, bias?, running_mean?, running_var?, training, momentum, eps,
  // cudnn_enabled), where one of its tensors is this batch norm's.
  void batch_norm(intercept::Call& call) {
    const auto arguments = call.arguments();
    const at::Tensor weight = tensor_or_none(arguments[1]);
    const at::Tensor running_mean = tensor_or_none(arguments[3]);
    const at::Tensor& passed = running_mean.defined() ? running_mean : weight;
    const bool ours = passed.defined() && passed.unsafeGetTensorImpl() == passed_;
    if (!ours || !take_training(arguments[5].toBool())) {
      call.proceed();
      return;
    }
    at::Tensor output = synced_batch_norm({.name = name_,
                                           .input = arguments[0].toTensor(),
                                           .weight = weight,
                                           .bias = tensor_or_none(arguments[2]),
                                           .running_mean = running_mean,
                                           .running_var = tensor_or_none(arguments[4]),
                                           .momentum = arguments[6].toDouble(),
                                           .eps = arguments[7].toDouble()},
                                          sum_);
    torch::jit::drop(call.stack(), arguments.size());
    torch::jit::push(call.stack(), std::move(output));
  }

  // Whether this call is a training's; the module knows again.
  bool take_training(bool training) {
    const auto module = module_.lock();
    if (module == nullptr) return false;
    if (training_hidden_) {
      training_hidden_ = false;
      set_training(*module, true);
      return true;
    }
    // Without running statistics `training` is true in evaluation, too, which has no partners.
    return training && module->is_training();
  }

  std::weak_ptr<torch::nn::Module> module_;
  std::string name_;
  std::shared_ptr<const SumOverRanks> sum_;
  const void* passed_ = nullptr;
  const void* num_batches_ = nullptr;
  bool training_hidden_ = false;  // see count_batch()
};

void lead_to(const at::Tensor& tensor, const std::shared_ptr<BatchNormOwner>& owner) {
  intercept::tag(tensor);
  intercept::add_owner(tensor.storage(), owner);
}

// The tensor that is passed to every call.
template <typename BatchNorm>
const at::Tensor& passed_tensor(const BatchNorm& norm) {
  return norm.running_mean.defined() ? norm.running_mean : norm.weight;
}

template <typename BatchNorm>
bool lead_if(torch::nn::Module& module, const std::string& name,
             const std::shared_ptr<BatchNormOwner>& owner) {
  auto* const norm = dynamic_cast<BatchNorm*>(&module);
  if (norm == nullptr) return false;
  const at::Tensor& passed = passed_tensor(*norm);
  if (!passed.defined())
    throw UsageError("the batch norm '{}' has neither weights nor running statistics, so it cannot "
                     "be recognised when it runs: give it one of them",
                     name);
  lead_to(passed, owner);
  if (norm->num_batches_tracked.defined()) lead_to(norm->num_batches_tracked, owner);
  owner->recognise(passed, norm->num_batches_tracked);
  return true;
}

template <typename BatchNorm>
bool leads_if(const torch::nn::Module& module, const intercept::Owner& owner) {
  const auto* const norm = dynamic_cast<const BatchNorm*>(&module);
  if (norm == nullptr) return false;
  const at::Tensor& passed = passed_tensor(*norm);
  if (!intercept::is_tagged(passed)) return false;
  const auto owners = intercept::owners_of(passed);
  return std::ranges::any_of(owners, [&](const auto& one) { return one.get() == &owner; });
}

// One sample, beside which another rank seems to have the same: what LibTorch alone refuses.
void check_by_trying() {
  const c10::NoGradGuard no_grad;
  const auto times_two =
      std::make_shared<const SumOverRanks>([](const at::Tensor& sums) { sums.mul_(2); });
  torch::nn::BatchNorm1d norm(torch::nn::BatchNorm1dOptions(2).momentum(0.5));
  const at::Tensor input = at::full({1, 2}, 3.0, norm->running_mean.options());
  std::string wrong;
  try {
    const auto owner = redirect_batch_norm(norm.ptr(), "self-check", times_two);
    const at::Tensor output = norm->forward(input);
    if (!output.eq(0).all().item<bool>() || !norm->is_training() ||
        norm->running_mean.sub(1.5).ne(0).any().item<bool>())
      wrong = "it gave other numbers";
  } catch (const c10::Error& error) {
    wrong = error.what_without_backtrace();
  }
  if (!wrong.empty())
    throw UsageError("batch norms cannot be synchronised with this LibTorch ({}), as one of them "
                     "showed when it was tried: {}. Do without convert_sync_batchnorm(), or use a "
                     "LibTorch that Lockstep was tested with (docs/tested.md)",
                     TORCH_VERSION, wrong);
}

}  // namespace

void check_batch_norms_can_be_redirected() {
  intercept::claim_key();
  static const bool works = [] {
    check_by_trying();
    return true;
  }();
  LOCKSTEP_CHECK(works);
}

std::shared_ptr<intercept::Owner> redirect_batch_norm(
    const std::shared_ptr<torch::nn::Module>& module, const std::string& name,
    const std::shared_ptr<const SumOverRanks>& sum) {
  const auto owner = std::make_shared<BatchNormOwner>(module, name, sum);
  const bool is_batch_norm = lead_if<torch::nn::BatchNorm1dImpl>(*module, name, owner) ||
                             lead_if<torch::nn::BatchNorm2dImpl>(*module, name, owner) ||
                             lead_if<torch::nn::BatchNorm3dImpl>(*module, name, owner);
  return is_batch_norm ? owner : nullptr;
}

bool leads_to(const torch::nn::Module& module, const intercept::Owner& owner) {
  return leads_if<torch::nn::BatchNorm1dImpl>(module, owner) ||
         leads_if<torch::nn::BatchNorm2dImpl>(module, owner) ||
         leads_if<torch::nn::BatchNorm3dImpl>(module, owner);
}

}  // namespace lockstep::replicate
