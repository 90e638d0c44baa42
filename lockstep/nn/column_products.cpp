#include <lockstep/nn/column_products.h>

#include <algorithm>
#include <optional>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <lockstep/base/error.h>
#include <lockstep/nn/once_differentiable.h>
#include <lockstep/nn/tensor_moves.h>
#include <lockstep/nn/weights_may_wait.h>

namespace lockstep::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct KeptAxis : torch::CustomClassHolder {
  explicit KeptAxis(std::shared_ptr<TensorAxis> axis) : axis(std::move(axis)) {}
  std::shared_ptr<TensorAxis> axis;
};

at::Tensor rows_of(const at::Tensor& x) { return x.reshape({-1, x.size(-1)}); }

// Autograd does not look for tensors in lists: so many pairs of a weight and a bias are arguments
// of their own, those that there are first.
static_assert(kMostProducts == 3);
using MaybeTensor = c10::optional<at::Tensor>;

// Of one pair, in this half of a pass or the whole of it.
struct WantedProduct {
  bool weight = false;
  bool bias = false;
};

struct ColumnProducts {
  static variable_list forward(AutogradContext* context, const at::Tensor& x,
                               const MaybeTensor& weight_0, const MaybeTensor& bias_0,
                               const MaybeTensor& weight_1, const MaybeTensor& bias_1,
                               const MaybeTensor& weight_2, const MaybeTensor& bias_2,
                               const std::shared_ptr<TensorAxis>& axis) {
    const at::Tensor all = axis->by_positions() ? internal::GatheringPositions(x, *axis).wait() : x;
    variable_list kept{x};
    variable_list results;
    c10::List<bool> has_bias;
    for (const auto& [weight, bias] :
         {std::pair(weight_0, bias_0), std::pair(weight_1, bias_1), std::pair(weight_2, bias_2)}) {
      if (!weight) continue;
      kept.push_back(*weight);
      has_bias.push_back(bias.has_value());
      results.push_back(at::linear(all, *weight, bias.value_or(at::Tensor())));
    }
    context->save_for_backward(kept);
    context->saved_data["has_bias"] = has_bias;
    context->saved_data["axis"] = c10::IValue::make_capsule(c10::make_intrusive<KeptAxis>(axis));
    return results;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    internal::refuse_double_backward("column_products");
    const auto saved = context->get_saved_variables();
    const auto has_bias = context->saved_data["has_bias"].toBoolList();
    const auto axis =
        c10::static_intrusive_pointer_cast<KeptAxis>(context->saved_data["axis"].toCapsule())->axis;
    const at::Tensor& x = saved[0];
    // In the type of the gradients, which autocast may have made another than the weights'.
    const auto in_type_of = [](const at::Tensor& tensor, const at::Tensor& gradient) {
      return tensor.to(gradient.scalar_type());
    };

    std::vector<WantedProduct> wanted(gradients.size());
    std::size_t edge = 0;
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      wanted[i].weight = context->needs_input_grad(++edge);
      wanted[i].bias = has_bias[i] && context->needs_input_grad(++edge);
    }
    const bool any_weight = std::ranges::any_of(wanted, &WantedProduct::weight);

    std::optional<internal::GatheringPositions> gathering;
    if (any_weight && axis->by_positions()) gathering.emplace(x, *axis);

    std::optional<internal::Moving> input_gradient;
    if (context->needs_input_grad(0)) {
      at::Tensor partial;
      for (std::size_t i = 0; i < gradients.size(); ++i) {
        if (!gradients[i].defined()) continue;
        const at::Tensor weight = in_type_of(saved[i + 1], gradients[i]);
        if (partial.defined())
          partial.addmm_(rows_of(gradients[i]), weight);
        else
          partial = at::mm(rows_of(gradients[i]), weight);
      }
      std::vector<std::int64_t> shape = x.sizes().vec();
      if (axis->by_positions()) shape[1] *= axis->size();
      input_gradient.emplace(internal::start_sum(partial.view(shape), *axis));
    }

    // The rest beside it.
    variable_list results(2 * kMostProducts + 2);
    const at::Tensor rows = rows_of(gathering ? gathering->wait() : x);
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      const at::Tensor& weight = saved[i + 1];
      if (!gradients[i].defined()) continue;
      const at::Tensor gradient = rows_of(gradients[i]);
      if (wanted[i].weight)
        results[2 * i + 1] =
            at::mm(gradient.t(), in_type_of(rows, gradient)).to(weight.scalar_type());
      if (wanted[i].bias) results[2 * i + 2] = gradient.sum(0).to(weight.scalar_type());
    }
    if (input_gradient) results[0] = input_gradient->wait();
    return results;
  }
};

}  // namespace

std::vector<at::Tensor> column_products(const at::Tensor& x,
                                        const std::vector<ProductWeights>& weights,
                                        const std::shared_ptr<TensorAxis>& axis) {
  LOCKSTEP_CHECK(!weights.empty() && weights.size() <= kMostProducts);
  const auto weight = [&](std::size_t i) {
    return i < weights.size() ? MaybeTensor(weights[i].weight) : c10::nullopt;
  };
  const auto bias = [&](std::size_t i) {
    return i < weights.size() && weights[i].bias.defined() ? MaybeTensor(weights[i].bias)
                                                           : c10::nullopt;
  };
  return WeightsMayWait<ColumnProducts>::apply(x, weight(0), bias(0), weight(1), bias(1), weight(2),
                                               bias(2), axis);
}

}  // namespace lockstep::nn
