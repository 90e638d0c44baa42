#include <lockstep/parallel/replicate/batch_norm_key.h>

#include <mutex>
#include <unordered_map>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/version.h>

#include <lockstep/base/error.h>

namespace lockstep::replicate {

namespace {

// No backend of LibTorch's uses it.
constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

// A batch norm that leads here. One thread at a time runs it.
struct Redirected {
  std::weak_ptr<torch::nn::Module> module;
  std::weak_ptr<const SumOverRanks> sum;
  std::string name;
  bool training_hidden = false;  // see count_batch()
};

// Not a subclass's override: only the flag itself is meant.
void set_training(torch::nn::Module& module, bool on) { module.torch::nn::Module::train(on); }

// Which batch norm a tagged tensor belongs to. The dispatcher calls plain functions, so this has to
// be one for the process.
class Register {
 public:
  static Register& instance() {
    static Register* const all = new Register;  // outlives every thread that still computes
    return *all;
  }

  void add(const at::Tensor& tensor, const std::shared_ptr<Redirected>& norm) {
    const std::lock_guard lock(mutex_);
    norms_[tensor.unsafeGetTensorImpl()] = norm;
  }
  void remove(const SumOverRanks* sum) {
    const std::lock_guard lock(mutex_);
    std::erase_if(norms_, [&](const auto& entry) {
      const auto held = entry.second->sum.lock();
      return held == nullptr || held.get() == sum || entry.second->module.expired();
    });
  }
  std::shared_ptr<Redirected> find(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    const auto found = norms_.find(tensor.unsafeGetTensorImpl());
    return found == norms_.end() ? nullptr : found->second;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const void*, std::shared_ptr<Redirected>> norms_;
};

at::Tensor tensor_or_none(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

// aten::add_(self, other, alpha), where self is a batch norm's count of batches: it adds one at the
// beginning of a forward that trains. LibTorch's module goes on to refuse one value per channel
// where it trains, though other ranks may have more: until it comes to batch_norm() below, it does
// not know that it trains.
void count_batch(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard below(kKey);
  const auto norm = Register::instance().find(torch::jit::last(*stack, 3)[0].toTensor());
  op.callBoxed(stack);
  const auto module = norm == nullptr ? nullptr : norm->module.lock();
  if (module == nullptr || norm->sum.expired() || !module->is_training()) return;
  norm->training_hidden = true;
  set_training(*module, false);
}

// Whether this call is a training's; the module knows again.
bool take_training(Redirected& norm, bool training) {
  const auto module = norm.module.lock();
  if (module == nullptr) return false;
  if (norm.training_hidden) {
    norm.training_hidden = false;
    set_training(*module, true);
    return true;
  }
  // Without running statistics `training` is true in evaluation, too, which has no partners.
  return training && module->is_training();
}

// aten::batch_norm(input, weight?, bias?, running_mean?, running_var?, training, momentum, eps,
// cudnn_enabled), where one of its tensors is tagged.
void batch_norm(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard below(kKey);
  const auto arguments = torch::jit::last(*stack, 9);
  const at::Tensor weight = tensor_or_none(arguments[1]);
  const at::Tensor running_mean = tensor_or_none(arguments[3]);
  const at::Tensor& tagged = running_mean.defined() ? running_mean : weight;
  const auto norm = tagged.defined() ? Register::instance().find(tagged) : nullptr;
  const bool trains = norm != nullptr && take_training(*norm, arguments[5].toBool());
  auto sum = trains ? norm->sum.lock() : nullptr;
  if (sum == nullptr) {
    op.callBoxed(stack);
    return;
  }
  at::Tensor output = synced_batch_norm({.name = norm->name,
                                         .input = arguments[0].toTensor(),
                                         .weight = weight,
                                         .bias = tensor_or_none(arguments[2]),
                                         .running_mean = running_mean,
                                         .running_var = tensor_or_none(arguments[4]),
                                         .momentum = arguments[6].toDouble(),
                                         .eps = arguments[7].toDouble()},
                                        std::move(sum));
  torch::jit::drop(*stack, 9);
  torch::jit::push(*stack, std::move(output));
}

[[noreturn]] void refuse_key(const std::string& of_what) {
  throw UsageError(
      "another library of this process has functions of its own for {} under LibTorch's "
      "dispatch key {}, which Lockstep synchronises batch norms with: do without that "
      "library, or without convert_sync_batchnorm()",
      of_what, c10::toString(kKey));
}

void check_key_is_free() {
  auto& dispatcher = c10::Dispatcher::singleton();
  if (dispatcher.hasBackendFallbackForDispatchKey(kKey)) refuse_key("all operators");
  for (const c10::OperatorName& name : dispatcher.getAllOpNames())
    if (const auto op = dispatcher.findOp(name); op && op->hasKernelForDispatchKey(kKey))
      refuse_key(c10::toString(name));
}

void register_functions() {
  // Never unregistered: threads may compute until the process ends.
  auto* const others = new torch::Library(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
  others->fallback(torch::CppFunction::makeFallthrough());
  auto* const ours = new torch::Library(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
  ours->impl("batch_norm", torch::CppFunction::makeFromBoxedFunction<&batch_norm>());
  ours->impl("add_.Scalar", torch::CppFunction::makeFromBoxedFunction<&count_batch>());
}

// One sample, beside which another rank seems to have the same: what LibTorch alone refuses.
void check_key_leads_here() {
  const c10::NoGradGuard no_grad;
  const auto times_two =
      std::make_shared<const SumOverRanks>([](const at::Tensor& sums) { sums.mul_(2); });
  torch::nn::BatchNorm1d norm(torch::nn::BatchNorm1dOptions(2).momentum(0.5));
  const at::Tensor input = at::full({1, 2}, 3.0, norm->running_mean.options());
  std::string wrong;
  try {
    redirect_batch_norm(norm.ptr(), "self-check", times_two);
    const at::Tensor output = norm->forward(input);
    if (!output.eq(0).all().item<bool>() || !norm->is_training() ||
        norm->running_mean.sub(1.5).ne(0).any().item<bool>())
      wrong = "it gave other numbers";
  } catch (const c10::Error& error) {
    wrong = error.what_without_backtrace();
  }
  release_batch_norms(times_two.get());
  if (!wrong.empty())
    throw UsageError("batch norms cannot be synchronised with this LibTorch ({}), as one of them "
                     "showed when it was tried: {}. Do without convert_sync_batchnorm(), or use a "
                     "LibTorch that Lockstep was tested with (docs/tested.md)",
                     TORCH_VERSION, wrong);
}

// The tensor stays the same object, which its module's members and optimizers refer to.
void tag(const at::Tensor& tensor, const std::shared_ptr<Redirected>& norm) {
  const c10::NoGradGuard no_grad;
  auto tagged = c10::make_intrusive<c10::TensorImpl>(c10::Storage(tensor.storage()),
                                                     tensor.key_set().add(kKey), tensor.dtype());
  tagged->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  tagged->set_storage_offset(tensor.storage_offset());
  tensor.set_data(at::Tensor(std::move(tagged)));
  Register::instance().add(tensor, norm);
}

template <typename BatchNorm>
bool tag_if(torch::nn::Module& module, const std::shared_ptr<Redirected>& redirected) {
  auto* const norm = dynamic_cast<BatchNorm*>(&module);
  if (norm == nullptr) return false;
  // The tensor that is passed to every call.
  const at::Tensor& passed = norm->running_mean.defined() ? norm->running_mean : norm->weight;
  if (!passed.defined())
    throw UsageError("the batch norm '{}' has neither weights nor running statistics, so it cannot "
                     "be recognised when it runs: give it one of them",
                     redirected->name);
  tag(passed, redirected);
  if (norm->num_batches_tracked.defined()) tag(norm->num_batches_tracked, redirected);
  return true;
}

}  // namespace

void claim_batch_norm_key() {
  // In two steps: what was registered before a check failed must not be taken for somebody else's.
  static const bool registered = [] {
    check_key_is_free();
    register_functions();
    return true;
  }();
  static const bool works = [] {
    check_key_leads_here();
    return true;
  }();
  LOCKSTEP_CHECK(registered && works);
}

bool redirect_batch_norm(const std::shared_ptr<torch::nn::Module>& module, const std::string& name,
                         const std::shared_ptr<const SumOverRanks>& sum) {
  const auto redirected =
      std::make_shared<Redirected>(Redirected{.module = module, .sum = sum, .name = name});
  return tag_if<torch::nn::BatchNorm1dImpl>(*module, redirected) ||
         tag_if<torch::nn::BatchNorm2dImpl>(*module, redirected) ||
         tag_if<torch::nn::BatchNorm3dImpl>(*module, redirected);
}

void release_batch_norms(const SumOverRanks* sum) { Register::instance().remove(sum); }

}  // namespace lockstep::replicate
