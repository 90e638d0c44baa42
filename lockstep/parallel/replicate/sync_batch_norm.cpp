#include <lockstep/parallel/replicate/sync_batch_norm.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/version.h>

#include <lockstep/base/error.h>
#include <lockstep/intercept/backward.h>
#include <lockstep/intercept/owner.h>

namespace lockstep::replicate {

namespace {

// The arguments of aten::batch_norm in training, and the module that called it.
struct NormCall {
  std::string name;                      // for errors
  at::Tensor input;                      // [samples, channels, …]: this rank's
  at::Tensor weight, bias;               // [channels] or undefined
  at::Tensor running_mean, running_var;  // [channels], updated where defined
  double momentum = 0;
  double eps = 0;
};

// The type of sums: MPS has no double.
at::ScalarType type_of_sums(const at::Tensor& input) {
  return input.device().type() == c10::DeviceType::MPS ? at::kFloat : at::kDouble;
}

// The type of single values.
at::ScalarType type_of_values(const at::Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// Reshapes [channels] so that it broadcasts against the input's [samples, channels, …].
at::Tensor along_channels(const at::Tensor& values, const at::Tensor& input) {
  std::vector<std::int64_t> shape(static_cast<std::size_t>(input.dim()), 1);
  shape[1] = input.size(1);
  return values.view(shape);
}

at::Tensor sum_per_channel(const at::Tensor& input) {
  std::vector<std::int64_t> dims = {0};
  for (std::int64_t dim = 2; dim < input.dim(); ++dim) dims.push_back(dim);
  return input.sum(dims, false, type_of_sums(input));
}

// The count is read only by a rank with at most one value: reading it makes the host wait for a
// GPU.
void check_count(const NormCall& call, std::int64_t mine, const at::Tensor& count) {
  if (mine > 1) return;
  const auto all = static_cast<std::int64_t>(count.item<double>());
  if (all > 1) return;
  throw UsageError("the batch norm '{}' got {} value{} per channel over all ranks: its statistics "
                   "need at least 2. Use a larger batch, or drop the last one (drop_last)",
                   call.name, all, all == 1 ? "" : "s");
}

class SyncedNorm : public torch::autograd::Function<SyncedNorm> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                            const c10::optional<at::Tensor>&, const c10::optional<at::Tensor>&,
                            const NormCall& call, const std::shared_ptr<const SumOverRanks>& sum) {
    const at::Tensor &weight = call.weight, &bias = call.bias;
    // The mean first, then the squares of the differences from it: plain sums of squares cancel.
    const std::int64_t channels = input.size(1);
    const std::int64_t mine = input.numel() / std::max<std::int64_t>(channels, 1);
    const at::Tensor sums = at::empty({channels + 1}, input.options().dtype(type_of_sums(input)));
    sums.narrow(0, 0, channels).copy_(sum_per_channel(input));
    sums[channels].fill_(static_cast<double>(mine));
    (*sum)(sums);
    const at::Tensor count = sums[channels];
    check_count(call, mine, count);
    const at::ScalarType type = type_of_values(input);
    const at::Tensor exact_mean = sums.narrow(0, 0, channels) / count;
    const at::Tensor mean = exact_mean.to(type);
    const at::Tensor centred = input.to(type) - along_channels(mean, input);
    const at::Tensor squares = sum_per_channel(centred * centred);
    (*sum)(squares);
    const at::Tensor inverse = (squares / count + call.eps).rsqrt().to(type);
    update(call.running_mean, exact_mean, call.momentum);
    update(call.running_var, squares / (count - 1), call.momentum);
    at::Tensor output = centred * along_channels(inverse, input);
    if (weight.defined()) output = output * along_channels(weight.to(type), input);
    if (bias.defined()) output = output + along_channels(bias.to(type), input);
    // The input is saved, not `centred`: the operator that made it keeps it anyway.
    context->save_for_backward({input, mean, inverse, weight, bias, count});
    context->saved_data["sum"] = c10::IValue::make_capsule(c10::make_intrusive<Held>(sum));
    return output.to(input.scalar_type());
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &input = saved[0], &mean = saved[1], &inverse = saved[2], &weight = saved[3],
                     &bias = saved[4], &count = saved[5];
    const auto held = context->saved_data["sum"].toCapsule();
    const SumOverRanks& sum = *static_cast<const Held&>(*held).sum;
    const at::ScalarType type = mean.scalar_type();
    const std::int64_t channels = input.size(1);
    const at::Tensor gradient = gradients[0].to(type);
    const at::Tensor normal =
        (input.to(type) - along_channels(mean, input)) * along_channels(inverse, input);
    const at::Tensor bias_gradient = sum_per_channel(gradient);
    const at::Tensor weight_gradient = sum_per_channel(gradient * normal);
    const at::Tensor sums = at::cat({bias_gradient, weight_gradient});
    sum(sums);
    const at::Tensor means = (sums / count).to(type);
    const at::Tensor input_gradient =
        gradient - along_channels(means.narrow(0, 0, channels), input) -
        normal * along_channels(means.narrow(0, channels, channels), input);
    const at::Tensor scale = weight.defined() ? weight.to(type) * inverse : inverse;
    // Gradients of this rank's samples: data parallelism sums them over the ranks like all others.
    return {(input_gradient * along_channels(scale, input)).to(input.scalar_type()),
            weight.defined() ? weight_gradient.to(weight.scalar_type()) : at::Tensor(),
            bias.defined() ? bias_gradient.to(bias.scalar_type()) : at::Tensor(), at::Tensor(),
            at::Tensor()};
  }

 private:
  // Keeps the group alive between forward and backward.
  struct Held : torch::CustomClassHolder {
    explicit Held(std::shared_ptr<const SumOverRanks> held) : sum(std::move(held)) {}
    std::shared_ptr<const SumOverRanks> sum;
  };

  static void update(const at::Tensor& running, const at::Tensor& current, double momentum) {
    if (running.defined())
      running.mul_(1 - momentum).add_(current.to(running.scalar_type()), momentum);
  }
};

// Autograd accepts an argument that may be undefined only as an optional.
c10::optional<at::Tensor> if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? c10::optional<at::Tensor>(tensor) : c10::nullopt;
}

// The batch norm over the samples of all ranks, with autograd. `sum` is kept for backward, which
// calls it once; forward calls it twice. The output has the input's type, as LibTorch's has, and is
// computed in float if the input has 16 bits.
//
// Failure: UsageError, the same on all ranks, where they have fewer than two values per channel
// together; what `sum` throws.
at::Tensor synced_batch_norm(const NormCall& call, std::shared_ptr<const SumOverRanks> sum) {
  return SyncedNorm::apply(call.input, if_defined(call.weight), if_defined(call.bias), call,
                           std::move(sum));
}

// Sets the flag alone, and calls no subclass's override.
void set_training(torch::nn::Module& module, bool on) { module.torch::nn::Module::train(on); }

at::Tensor tensor_or_none(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

bool is_operator(const intercept::Call& call, const char* name, const char* overload) {
  const c10::OperatorName& called = call.op().operator_name();
  return called.name == name && called.overload_name == overload;
}

// Takes the calls of one batch norm of LibTorch's, which knows nothing of us. Threading: one thread
// at a time runs a batch norm.
class BatchNormOwner final : public intercept::Owner {
 public:
  BatchNormOwner(std::weak_ptr<torch::nn::Module> module, std::string name,
                 std::shared_ptr<const SumOverRanks> sum)
      : module_(std::move(module)), name_(std::move(name)), sum_(std::move(sum)) {}

  // Its calls are recognised by these tensors, which are not kept alive.
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
  // aten::add_(self, other, alpha), where self is a batch norm's count of batches: a forward that
  // trains begins by adding one. LibTorch's module then refuses one value per channel if it trains,
  // though other ranks may have more. So the module is set not to train until batch_norm() below.
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

  // Whether this call is in training. Sets the module's flag again if it was hidden.
  bool take_training(bool training) {
    const auto module = module_.lock();
    if (module == nullptr) return false;
    if (training_hidden_) {
      training_hidden_ = false;
      set_training(*module, true);
      return true;
    }
    // Without running statistics `training` is also true in evaluation, where other ranks may not
    // call it.
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

std::shared_ptr<intercept::Owner> redirect_batch_norm(
    const std::shared_ptr<torch::nn::Module>& module, const std::string& name,
    const std::shared_ptr<const SumOverRanks>& sum);

// Tries one sample, as if another rank had the same one: LibTorch alone refuses that.
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

// Proves once that the redirection works with this LibTorch. UsageError saying who has the dispatch
// key that it takes, or what a batch norm did instead.
void check_batch_norms_can_be_redirected() {
  intercept::claim_key();
  static const bool works = [] {
    check_by_trying();
    return true;
  }();
  LOCKSTEP_CHECK(works);
}

// While the result lives, a BatchNorm1d, 2d or 3d sums its statistics with `sum` when it trains.
// Null where the module is none of these. The module is not kept alive. UsageError naming a batch
// norm that has neither weights nor running statistics.
std::shared_ptr<intercept::Owner> redirect_batch_norm(
    const std::shared_ptr<torch::nn::Module>& module, const std::string& name,
    const std::shared_ptr<const SumOverRanks>& sum) {
  const auto owner = std::make_shared<BatchNormOwner>(module, name, sum);
  const bool is_batch_norm = lead_if<torch::nn::BatchNorm1dImpl>(*module, name, owner) ||
                             lead_if<torch::nn::BatchNorm2dImpl>(*module, name, owner) ||
                             lead_if<torch::nn::BatchNorm3dImpl>(*module, name, owner);
  return is_batch_norm ? owner : nullptr;
}

// Whether a batch norm still leads to that owner: no longer once it was loaded or converted.
bool leads_to(const torch::nn::Module& module, const intercept::Owner& owner) {
  return leads_if<torch::nn::BatchNorm1dImpl>(module, owner) ||
         leads_if<torch::nn::BatchNorm2dImpl>(module, owner) ||
         leads_if<torch::nn::BatchNorm3dImpl>(module, owner);
}

}  // namespace

// Checks before every backward pass.
class SyncBatchNorm::Watch final : public intercept::PassListener {
 public:
  explicit Watch(const SyncBatchNorm& norms) : norms_(norms) {}
  void before_pass(const intercept::Pass& pass) override { norms_.check_redirected(pass); }
  void before_inner_pass(const intercept::Pass& pass) override { norms_.check_redirected(pass); }

 private:
  const SyncBatchNorm& norms_;
};

SyncBatchNorm::SyncBatchNorm(torch::nn::Module& module, comm::Communicator& group)
    : parameters_(module) {
  check_batch_norms_can_be_redirected();
  sum_ = std::make_shared<const SumOverRanks>(
      [own = group.split(0, group.rank(), "sync_batch_norm")](const at::Tensor& sums) {
        own->all_reduce(sums).wait();
      });
  for (const auto& item : module.named_modules()) {
    if (converted(*item.value())) continue;
    if (auto owner = redirect_batch_norm(item.value(), item.key(), sum_))
      norms_.push_back({item.value(), item.key(), std::move(owner)});
  }
  watch_ = std::make_shared<Watch>(*this);
  intercept::add_pass_listener(watch_);
}

void SyncBatchNorm::check_redirected(const intercept::Pass& pass) const {
  for (const Converted& norm : norms_)
    if (const auto module = norm.module.lock(); module != nullptr && module->is_training() &&
                                                !leads_to(*module, *norm.owner) &&
                                                pass.reaches(parameters_.all()))
      throw UsageError(
          "the batch norm '{}' was loaded or converted after convert_sync_batchnorm(), "
          "as torch::load() and to() do, so that its statistics are those of this "
          "rank's samples alone: load and convert the model before wrap_model()",
          norm.name);
}

bool SyncBatchNorm::converted(const torch::nn::Module& norm) const {
  return std::ranges::any_of(norms_,
                             [&](const auto& known) { return known.module.lock().get() == &norm; });
}

bool SyncBatchNorm::converted_any_of(const torch::nn::Module& module) const {
  return converted(module) ||
         std::ranges::any_of(module.modules(/*include_self=*/false),
                             [&](const auto& inner) { return converted(*inner); });
}

void SyncBatchNorm::renew() {
  for (Converted& norm : norms_)
    if (const auto module = norm.module.lock())
      norm.owner = redirect_batch_norm(module, norm.name, sum_);
}

bool SyncBatchNorm::expired() const {
  return std::ranges::all_of(norms_, [](const auto& norm) { return norm.module.expired(); });
}

}  // namespace lockstep::replicate
