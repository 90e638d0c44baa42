#include <lockstep/parallel/replicate/sync_batch_norm.h>

#include <mutex>
#include <unordered_map>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>
#include <torch/nn/modules/batchnorm.h>

#include <lockstep/base/error.h>

namespace lockstep::replicate {

namespace {

// No backend of LibTorch's uses it.
constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

// Which group a tagged tensor's batch norm belongs to. The dispatcher calls a plain function, so
// this has to be one for the process.
class Register {
 public:
  static Register& instance() {
    static Register* const all = new Register;  // outlives every thread that still computes
    return *all;
  }

  void add(const at::Tensor& tensor, const std::shared_ptr<comm::Communicator>& group) {
    const std::lock_guard lock(mutex_);
    groups_[tensor.unsafeGetTensorImpl()] = group;
  }
  void remove(const comm::Communicator* group) {
    const std::lock_guard lock(mutex_);
    std::erase_if(groups_, [&](const auto& entry) {
      const auto held = entry.second.lock();
      return held == nullptr || held.get() == group;
    });
  }
  std::shared_ptr<comm::Communicator> find(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    const auto found = groups_.find(tensor.unsafeGetTensorImpl());
    return found == groups_.end() ? nullptr : found->second.lock();
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const void*, std::weak_ptr<comm::Communicator>> groups_;
};

// A channel's values as [.., channels, ..] against [channels].
at::Tensor along_channels(const at::Tensor& values, const at::Tensor& input) {
  std::vector<std::int64_t> shape(static_cast<std::size_t>(input.dim()), 1);
  shape[1] = input.size(1);
  return values.view(shape);
}

at::Tensor sum_per_channel(const at::Tensor& input) {
  std::vector<std::int64_t> dims = {0};
  for (std::int64_t dim = 2; dim < input.dim(); ++dim) dims.push_back(dim);
  return input.sum(dims, false, at::kDouble);
}

class SyncedNorm : public torch::autograd::Function<SyncedNorm> {
 public:
  struct Statistics {
    at::Tensor running_mean, running_var;  // updated where defined
    double momentum = 0;
    double eps = 0;
    std::shared_ptr<comm::Communicator> group;
  };

  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                            const at::Tensor& weight, const at::Tensor& bias,
                            const Statistics& statistics) {
    // Mean first, then the squares around it: sums of squares alone cancel.
    const std::int64_t channels = input.size(1);
    const at::Tensor sums = at::empty({channels + 1}, input.options().dtype(at::kDouble));
    sums.narrow(0, 0, channels).copy_(sum_per_channel(input));
    sums[channels].fill_(static_cast<double>(input.numel() / std::max<std::int64_t>(channels, 1)));
    statistics.group->all_reduce(sums).wait();
    const at::Tensor count = sums[channels];
    const at::Tensor mean = sums.narrow(0, 0, channels) / count;
    const at::Tensor centred = input - along_channels(mean.to(input.scalar_type()), input);
    const at::Tensor squares = sum_per_channel(centred * centred);
    statistics.group->all_reduce(squares).wait();
    const at::Tensor variance = squares / count;
    const at::Tensor inverse = (variance + statistics.eps).rsqrt().to(input.scalar_type());
    if (statistics.running_mean.defined()) {
      const double keep = 1 - statistics.momentum;
      const at::Tensor unbiased = squares / (count - 1).clamp_min(1);
      statistics.running_mean.mul_(keep).add_(mean.to(statistics.running_mean.scalar_type()),
                                              statistics.momentum);
      statistics.running_var.mul_(keep).add_(unbiased.to(statistics.running_var.scalar_type()),
                                             statistics.momentum);
    }
    const at::Tensor normal = centred * along_channels(inverse, input);
    context->save_for_backward({normal, inverse, weight, count});
    context->saved_data["group"] =
        c10::IValue::make_capsule(c10::make_intrusive<Held>(statistics.group));
    at::Tensor output = normal;
    if (weight.defined()) output = output * along_channels(weight, input);
    if (bias.defined()) output = output + along_channels(bias, input);
    // Its own tensor, as the saved one must not be changed in place by what follows.
    return output.is_same(normal) ? output.clone() : output;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &normal = saved[0], &inverse = saved[1], &weight = saved[2], &count = saved[3];
    const at::Tensor gradient = gradients[0].contiguous();
    const auto held = context->saved_data["group"].toCapsule();
    const auto& group = static_cast<const Held&>(*held).group;
    const std::int64_t channels = normal.size(1);
    const at::Tensor bias_gradient = sum_per_channel(gradient);
    const at::Tensor weight_gradient = sum_per_channel(gradient * normal);
    const at::Tensor sums = at::cat({bias_gradient, weight_gradient});
    group->all_reduce(sums).wait();
    const at::Tensor means = (sums / count).to(normal.scalar_type());
    at::Tensor input_gradient =
        gradient - along_channels(means.narrow(0, 0, channels), normal) -
        normal * along_channels(means.narrow(0, channels, channels), normal);
    const at::Tensor scale = weight.defined() ? weight * inverse : inverse;
    input_gradient = input_gradient * along_channels(scale, normal);
    // Those of this rank's samples: data parallelism sums them over ranks as it does all others.
    return {input_gradient,
            weight.defined() ? weight_gradient.to(normal.scalar_type()) : at::Tensor(),
            weight.defined() ? bias_gradient.to(normal.scalar_type()) : at::Tensor(), at::Tensor()};
  }

 private:
  // What keeps a group alive between forward and backward.
  struct Held : torch::CustomClassHolder {
    explicit Held(std::shared_ptr<comm::Communicator> held) : group(std::move(held)) {}
    std::shared_ptr<comm::Communicator> group;
  };
};

at::Tensor tensor_or_none(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

// aten::batch_norm(input, weight?, bias?, running_mean?, running_var?, training, momentum, eps,
// cudnn_enabled), where one of its tensors is tagged.
void batch_norm(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard below(kKey);
  const auto arguments = torch::jit::last(*stack, 9);
  const at::Tensor weight = tensor_or_none(arguments[1]);
  const at::Tensor running_mean = tensor_or_none(arguments[3]);
  const bool training = arguments[5].toBool();
  const at::Tensor& tagged = weight.defined() ? weight : running_mean;
  const auto group = training && tagged.defined() ? Register::instance().find(tagged) : nullptr;
  if (group == nullptr) {
    op.callBoxed(stack);
    return;
  }
  at::Tensor output =
      SyncedNorm::apply(arguments[0].toTensor(), weight, tensor_or_none(arguments[2]),
                        SyncedNorm::Statistics{.running_mean = running_mean,
                                               .running_var = tensor_or_none(arguments[4]),
                                               .momentum = arguments[6].toDouble(),
                                               .eps = arguments[7].toDouble(),
                                               .group = group});
  torch::jit::drop(*stack, 9);
  torch::jit::push(*stack, std::move(output));
}

void register_key() {
  static const bool once = [] {
    // Never unregistered: threads may compute until the process ends.
    auto* const others = new torch::Library(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
    others->fallback(torch::CppFunction::makeFallthrough());
    auto* const ours = new torch::Library(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
    ours->impl("batch_norm", torch::CppFunction::makeFromBoxedFunction<&batch_norm>());
    return true;
  }();
  (void)once;
}

// The tensor stays the same object, which its module's members and optimizers refer to.
void tag(const at::Tensor& tensor) {
  const c10::NoGradGuard no_grad;
  auto tagged = c10::make_intrusive<c10::TensorImpl>(c10::Storage(tensor.storage()),
                                                     tensor.key_set().add(kKey), tensor.dtype());
  tagged->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  tagged->set_storage_offset(tensor.storage_offset());
  tensor.set_data(at::Tensor(std::move(tagged)));
}

// The tensor of a batch norm that is passed to every call.
template <typename BatchNorm>
bool tag_if(torch::nn::Module& module, const std::string& name,
            const std::shared_ptr<comm::Communicator>& group) {
  auto* const norm = dynamic_cast<BatchNorm*>(&module);
  if (norm == nullptr) return false;
  const at::Tensor& tensor = norm->weight.defined() ? norm->weight : norm->running_mean;
  if (!tensor.defined())
    throw UsageError("the batch norm '{}' has neither weights nor running statistics, so it cannot "
                     "be recognised when it runs: give it one of them",
                     name);
  tag(tensor);
  Register::instance().add(tensor, group);
  return true;
}

}  // namespace

SyncBatchNorm::SyncBatchNorm(torch::nn::Module& module, comm::Communicator& group)
    : group_(group.split(0, group.rank(), "sync_batch_norm")) {
  register_key();
  for (const auto& item : module.named_modules()) {
    if (tag_if<torch::nn::BatchNorm1dImpl>(*item.value(), item.key(), group_) ||
        tag_if<torch::nn::BatchNorm2dImpl>(*item.value(), item.key(), group_) ||
        tag_if<torch::nn::BatchNorm3dImpl>(*item.value(), item.key(), group_))
      ++num_converted_;
  }
}

SyncBatchNorm::~SyncBatchNorm() { Register::instance().remove(group_.get()); }

}  // namespace lockstep::replicate
