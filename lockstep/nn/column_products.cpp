#include <lockstep/nn/column_products.h>

#include <optional>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <lockstep/nn/once_differentiable.h>
#include <lockstep/nn/tensor_moves.h>

namespace lockstep::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct KeptAxis : torch::CustomClassHolder {
  explicit KeptAxis(std::shared_ptr<TensorAxis> axis) : axis(std::move(axis)) {}
  std::shared_ptr<TensorAxis> axis;
};

at::Tensor rows_of(const at::Tensor& x) { return x.reshape({-1, x.size(-1)}); }

// For each weight which of the parameters is its bias, or -1. Not a plain vector, whose elements
// autograd would take for arguments.
struct BiasOf {
  std::vector<std::int64_t> parameter;
};

// `parameters` are the weights, and then the biases that there are.
class ColumnProducts : public torch::autograd::Function<ColumnProducts> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& x,
                               const std::vector<at::Tensor>& parameters, const BiasOf& biases,
                               const std::shared_ptr<TensorAxis>& axis) {
    const auto& bias_of = biases.parameter;
    variable_list kept{x};
    kept.insert(kept.end(), parameters.begin(),
                parameters.begin() + static_cast<std::ptrdiff_t>(bias_of.size()));
    context->save_for_backward(kept);
    context->saved_data["bias_of"] = bias_of;
    context->saved_data["num_parameters"] = static_cast<std::int64_t>(parameters.size());
    context->saved_data["axis"] = c10::IValue::make_capsule(c10::make_intrusive<KeptAxis>(axis));
    const at::Tensor all = axis->by_positions() ? internal::GatheringPositions(x, *axis).wait() : x;
    variable_list results;
    for (std::size_t i = 0; i < bias_of.size(); ++i)
      results.push_back(at::linear(
          all, parameters[i],
          bias_of[i] < 0 ? at::Tensor() : parameters[static_cast<std::size_t>(bias_of[i])]));
    return results;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    internal::refuse_double_backward("column_products");
    const auto saved = context->get_saved_variables();
    const auto bias_of = context->saved_data["bias_of"].toIntVector();
    const auto axis =
        c10::static_intrusive_pointer_cast<KeptAxis>(context->saved_data["axis"].toCapsule())->axis;
    const at::Tensor& x = saved[0];
    // In the type of the gradients, which autocast may have made another than the weights'.
    const auto in_type_of = [](const at::Tensor& tensor, const at::Tensor& gradient) {
      return tensor.to(gradient.scalar_type());
    };

    std::optional<internal::GatheringPositions> gathering;
    if (axis->by_positions()) gathering.emplace(x, *axis);

    std::optional<internal::Moving> input_gradient;
    if (context->needs_input_grad(0)) {
      at::Tensor partial;
      for (std::size_t i = 0; i < bias_of.size(); ++i) {
        if (!gradients[i].defined()) continue;
        const at::Tensor weight = in_type_of(saved[i + 1], gradients[i]);
        if (partial.defined())
          partial.addmm_(rows_of(gradients[i]), weight);
        else
          partial = at::mm(rows_of(gradients[i]), weight);
      }
      std::vector<std::int64_t> shape = x.sizes().vec();
      if (axis->by_positions()) shape[1] *= axis->size();
      if (!partial.defined()) partial = at::zeros({c10::multiply_integers(shape)}, x.options());
      input_gradient.emplace(internal::start_sum(partial.view(shape), *axis));
    }

    // The rest beside it.
    variable_list results(static_cast<std::size_t>(context->saved_data["num_parameters"].toInt()) +
                          3);
    const at::Tensor rows = rows_of(gathering ? gathering->wait() : x);
    for (std::size_t i = 0; i < bias_of.size(); ++i) {
      if (!gradients[i].defined()) continue;
      const at::Tensor gradient = rows_of(gradients[i]);
      const at::Tensor& weight = saved[i + 1];
      if (context->needs_input_grad(i + 1))
        results[i + 1] = at::mm(gradient.t(), in_type_of(rows, gradient)).to(weight.scalar_type());
      if (bias_of[i] >= 0 && context->needs_input_grad(static_cast<std::size_t>(bias_of[i]) + 1))
        results[static_cast<std::size_t>(bias_of[i]) + 1] =
            gradient.sum(0).to(weight.scalar_type());
    }
    if (input_gradient) results[0] = input_gradient->wait();
    return results;
  }
};

}  // namespace

std::vector<at::Tensor> column_products(const at::Tensor& x,
                                        const std::vector<ProductWeights>& weights,
                                        const std::shared_ptr<TensorAxis>& axis) {
  std::vector<at::Tensor> parameters;
  BiasOf bias_of{std::vector<std::int64_t>(weights.size(), -1)};
  for (const ProductWeights& one : weights) parameters.push_back(one.weight);
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (!weights[i].bias.defined()) continue;
    bias_of.parameter[i] = static_cast<std::int64_t>(parameters.size());
    parameters.push_back(weights[i].bias);
  }
  return ColumnProducts::apply(x, parameters, bias_of, axis);
}

}  // namespace lockstep::nn
