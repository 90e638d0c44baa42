#include <lockstep/parallel/replicate/synced_norm.h>

#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <lockstep/base/error.h>

namespace lockstep::replicate {

namespace {

// What sums are in: MPS has nothing longer.
at::ScalarType type_of_sums(const at::Tensor& input) {
  return input.device().type() == c10::DeviceType::MPS ? at::kFloat : at::kDouble;
}

// What single values are in.
at::ScalarType type_of_values(const at::Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// A channel's values as [.., channels, ..] against [channels].
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

// The count is read only by a rank that may be the only one with a value: reading it makes a GPU's
// host wait.
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
    // Mean first, then the squares around it: sums of squares alone cancel.
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
    // The input rather than what was made of it: whatever made it keeps it anyway.
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
    // Those of this rank's samples: data parallelism sums them over ranks as it does all others.
    return {(input_gradient * along_channels(scale, input)).to(input.scalar_type()),
            weight.defined() ? weight_gradient.to(weight.scalar_type()) : at::Tensor(),
            bias.defined() ? bias_gradient.to(bias.scalar_type()) : at::Tensor(), at::Tensor(),
            at::Tensor()};
  }

 private:
  // What keeps the group alive between forward and backward.
  struct Held : torch::CustomClassHolder {
    explicit Held(std::shared_ptr<const SumOverRanks> held) : sum(std::move(held)) {}
    std::shared_ptr<const SumOverRanks> sum;
  };

  static void update(const at::Tensor& running, const at::Tensor& current, double momentum) {
    if (running.defined())
      running.mul_(1 - momentum).add_(current.to(running.scalar_type()), momentum);
  }
};

// Autograd knows of an argument that may be undefined only as an optional one.
c10::optional<at::Tensor> if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? c10::optional<at::Tensor>(tensor) : c10::nullopt;
}

}  // namespace

at::Tensor synced_batch_norm(const NormCall& call, std::shared_ptr<const SumOverRanks> sum) {
  return SyncedNorm::apply(call.input, if_defined(call.weight), if_defined(call.bias), call,
                           std::move(sum));
}

}  // namespace lockstep::replicate
