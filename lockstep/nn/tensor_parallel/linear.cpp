#include <lockstep/nn/tensor_parallel/linear.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <lockstep/base/error.h>
#include <lockstep/intercept/once_differentiable.h>
#include <lockstep/nn/tensor_parallel/tensor_axis.h>
#include <lockstep/nn/tensor_parallel/tensor_moves.h>
#include <lockstep/nn/tensor_parallel/weights_may_wait.h>

namespace lockstep::nn {

constexpr std::size_t kMostProducts = 3;

// A weight [out, in], whose outputs are cut over a tensor axis, and its bias [out], which may be
// undefined.
struct ProductWeights {
  at::Tensor weight;
  at::Tensor bias;
};

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct KeptAxis : torch::CustomClassHolder {
  explicit KeptAxis(std::shared_ptr<TensorAxis> axis) : axis(std::move(axis)) {}
  std::shared_ptr<TensorAxis> axis;
};

at::Tensor rows_of(const at::Tensor& x) { return x.reshape({-1, x.size(-1)}); }

// Autograd does not look for tensors in lists, so kMostProducts pairs of a weight and a bias are
// arguments of their own; unused pairs come last.
static_assert(kMostProducts == 3);
using MaybeTensor = c10::optional<at::Tensor>;

// The gradients of one pair that are wanted, in this half of a pass or in the whole pass.
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
    intercept::refuse_double_backward("column_products");
    const auto saved = context->get_saved_variables();
    const auto has_bias = context->saved_data["has_bias"].toBoolList();
    const auto axis =
        c10::static_intrusive_pointer_cast<KeptAxis>(context->saved_data["axis"].toCapsule())->axis;
    const at::Tensor& x = saved[0];
    // Converts to the type of the gradients, which may be autocast's instead of the weights'.
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

    // The gradients of the weights are computed while that sum is under way.
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

// Computes x · weightᵀ + bias for each of at most kMostProducts pairs; x [..., in] is in its form
// between layers (BetweenLayers). Backward sums the ranks' gradients of x once for all products,
// while it computes the gradients of the weights. Saves only x, in its form between layers.
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

namespace {

using mesh::Placement;

void check_not_cut(const std::shared_ptr<TensorAxis>& axis, const std::string& name) {
  if (axis != nullptr)
    throw UsageError("'{}' is cut over '{}' already: a layer is cut once", name,
                     axis->group()->name());
}

void check_vocabulary(const at::Tensor& weight, const TensorAxis& axis, const std::string& name) {
  if (weight.size(0) < axis.size())
    throw UsageError("'{}' has {} rows, which cannot be cut over the {} ranks of '{}': each needs "
                     "one at least",
                     name, weight.size(0), axis.size(), axis.group()->name());
}

// Rows of a weight in parts that differ by at most one.
CutParameter cut_vocabulary(at::Tensor& weight, const TensorAxis& axis) {
  const Placement::Shape shape = weight.sizes().vec();
  const auto placement = Placement::full(shape).cut_dim(0, axis.rank(), axis.size());
  internal::keep_part(weight, placement, placement.box_shape());
  return {.name = "weight",
          .parameter = weight,
          .whole_shape = shape,
          .placement = placement,
          .part_shape = weight.sizes().vec()};
}

void check_columns(std::int64_t outputs, const LayerCut& cut, const TensorAxis& axis,
                   const std::string& name) {
  if (cut.blocks < 1 || cut.unit < 1)
    throw UsageError("'{}' is to be cut into {} blocks of units of {} outputs: both are one or "
                     "more",
                     name, cut.blocks, cut.unit);
  const std::int64_t size = axis.size();
  const std::int64_t units = outputs / cut.blocks / cut.unit;
  if (units < 1 || cut.blocks * units * cut.unit != outputs ||
      (units % size != 0 && size % units != 0))
    throw UsageError("the {} outputs of '{}', {} blocks of {} units of {}, cannot be cut over the "
                     "{} ranks of '{}': the units must be a multiple of the ranks, or the ranks of "
                     "the units",
                     outputs, name, cut.blocks, units, cut.unit, size, axis.group()->name());
  if (cut.features == Features::whole && axis.by_positions())
    throw UsageError("'{}' gathers its outputs on every rank, and with sequence parallelism a rank "
                     "has some positions only: leave them cut, for a layer that is cut by rows",
                     name);
}

void check_rows(std::int64_t inputs, const LayerCut& cut, const TensorAxis& axis,
                const std::string& name) {
  const int size = axis.size();
  if (inputs % size != 0)
    throw UsageError("the {} inputs of '{}' cannot be cut over the {} ranks of '{}': {} is no "
                     "multiple of {}",
                     inputs, name, size, axis.group()->name(), inputs, size);
  if (cut.features == Features::whole && axis.by_positions())
    throw UsageError("'{}' takes its part of whole inputs, and sequence parallelism leaves no rank "
                     "any: cut the layer before it by columns",
                     name);
}

}  // namespace

LinearImpl::LinearImpl(std::int64_t in, std::int64_t out, Bias bias)
    : weight(register_parameter("weight", at::empty({out, in}))) {
  if (bias == Bias::added) this->bias = register_parameter("bias", at::empty({out}));
}

at::Tensor LinearImpl::forward(const at::Tensor& x) {
  if (axis_ == nullptr) return at::linear(x, weight, bias);
  check_parts();
  switch (cut_.kind) {
    case CutKind::column: {
      const at::Tensor y = column_products(x, {{weight, bias}}, axis_).front();
      return cut_.features == Features::whole ? all_outputs(y) : y;
    }
    case CutKind::row: {
      const at::Tensor mine = cut_.features == Features::whole ? take_features(x, *axis_) : x;
      const at::Tensor y = leave_products(at::linear(mine, weight), *axis_);
      // The product may be in autocast's type.
      return bias.defined() ? y + bias.to(y.scalar_type()) : y;
    }
    case CutKind::vocabulary: break;
  }
  throw UsageError("a layer that is cut by vocabulary has no forward(): its weight is for "
                   "vocab_parallel_cross_entropy(), or cut it by columns");
}

// Puts the outputs into the order of the whole layer: for each block, the parts of all ranks. If
// several ranks hold the same part, the first rank's is taken.
at::Tensor LinearImpl::all_outputs(const at::Tensor& y) const {
  const at::Tensor all = gather_features(y, *axis_);
  const int num_holders = cut_parameters_.front().num_holders;
  if (cut_.blocks == 1 && num_holders == 1) return all;
  return all.unflatten(-1, {axis_->size(), cut_.blocks, -1})
      .slice(-3, 0, axis_->size(), num_holders)
      .transpose(-3, -2)
      .flatten(-3);
}

std::vector<at::Tensor> linears(const at::Tensor& x, const std::vector<LinearImpl*>& layers) {
  if (layers.empty() || layers.size() > kMostProducts)
    throw UsageError("linears() takes one to {} layers, and was given {}", kMostProducts,
                     layers.size());
  const bool by_columns = std::ranges::all_of(layers, [&](const LinearImpl* layer) {
    return layer->axis_ != nullptr && layer->axis_ == layers.front()->axis_ &&
           layer->cut_.kind == CutKind::column && layer->cut_.features == Features::cut;
  });
  std::vector<at::Tensor> results;
  if (by_columns) {
    std::vector<ProductWeights> weights;
    for (const LinearImpl* layer : layers) {
      layer->check_parts();
      weights.push_back({layer->weight, layer->bias});
    }
    return column_products(x, weights, layers.front()->axis_);
  }
  for (LinearImpl* layer : layers) results.push_back(layer->forward(x));
  return results;
}

// The bias of rows is whole on every rank.
void LinearImpl::check_parts() const {
  internal::check_part(weight, cut_parameters_[0], cut_name_, *axis_);
  if (cut_parameters_.size() > 1) internal::check_part(bias, cut_parameters_[1], cut_name_, *axis_);
}

void LinearImpl::save(torch::serialize::OutputArchive& archive) const {
  if (axis_ != nullptr) internal::refuse_file("torch::save()", cut_name_, *axis_);
  Module::save(archive);
}

void LinearImpl::load(torch::serialize::InputArchive& archive) {
  if (axis_ != nullptr) internal::refuse_file("torch::load()", cut_name_, *axis_);
  Module::load(archive);
}

void LinearImpl::check_cut(const LayerCut& cut, const TensorAxis& axis,
                           const std::string& name) const {
  check_not_cut(axis_, name);
  switch (cut.kind) {
    case CutKind::column: return check_columns(weight.size(0), cut, axis, name);
    case CutKind::row: return check_rows(weight.size(1), cut, axis, name);
    case CutKind::vocabulary:
      if (bias.defined())
        throw UsageError("'{}' has a bias, and is to be cut by vocabulary: make it without one",
                         name);
      return check_vocabulary(weight, axis, name);
  }
}

void LinearImpl::cut(const LayerCut& cut, const std::shared_ptr<TensorAxis>& axis,
                     const std::string& name) {
  check_cut(cut, *axis, name);
  cut_ = cut;
  cut_name_ = name;
  axis_ = axis;
  switch (cut.kind) {
    case CutKind::column: return cut_columns();
    case CutKind::row: return cut_rows();
    case CutKind::vocabulary: cut_parameters_.push_back(cut_vocabulary(weight, *axis));
  }
}

void LinearImpl::cut_columns() {
  const std::int64_t out = weight.size(0), in = weight.size(1);
  const std::int64_t size = axis_->size();
  const std::int64_t per_block = out / cut_.blocks;
  const std::int64_t num_parts = std::min(per_block / cut_.unit, size);
  const int num_holders = static_cast<int>(size / num_parts);
  const int part = axis_->rank() / num_holders;
  const auto add = [&](const char* own_name, at::Tensor& parameter, Placement::Shape whole,
                       Placement::Shape shape) {
    const auto placement =
        Placement::full(std::move(whole)).cut_dim(1, part, static_cast<int>(num_parts));
    const Placement::Shape whole_shape = parameter.sizes().vec();
    internal::keep_part(parameter, placement, shape);
    cut_parameters_.push_back(
        {own_name, parameter, whole_shape, placement, num_holders, parameter.sizes().vec()});
    if (num_holders > 1)
      sum_gradients_over(parameter, axis_->holders_of_part(static_cast<int>(num_parts)));
  };
  add("weight", weight, {cut_.blocks, per_block, in}, {out / num_parts, in});
  if (bias.defined()) add("bias", bias, {cut_.blocks, per_block}, {out / num_parts});
}

void LinearImpl::cut_rows() {
  const Placement::Shape whole_shape = weight.sizes().vec();
  const auto placement = Placement::full(whole_shape).cut_dim(1, axis_->rank(), axis_->size());
  internal::keep_part(weight, placement, placement.box_shape());
  cut_parameters_.push_back(
      {"weight", weight, whole_shape, placement, /*num_holders=*/1, weight.sizes().vec()});
  // The bias is added to this rank's positions only.
  if (bias.defined() && axis_->by_positions()) sum_gradients_over(bias, axis_->group());
}

EmbeddingImpl::EmbeddingImpl(std::int64_t rows, std::int64_t width)
    : weight(register_parameter("weight", at::empty({rows, width}))) {}

at::Tensor EmbeddingImpl::forward(const at::Tensor& tokens) {
  if (axis_ == nullptr) return at::embedding(weight, tokens);
  internal::check_part(weight, cut_parameters_.front(), cut_name_, *axis_);
  const Placement& placement = cut_parameters_.front().placement;
  const mesh::Interval mine = placement.box()[0];
  const at::Tensor elsewhere = tokens.lt(mine.begin).logical_or(tokens.ge(mine.end));
  // A token outside the whole vocabulary stays outside, so that it fails as it does in a layer that
  // is not cut.
  const at::Tensor on_another =
      elsewhere.logical_and(tokens.ge(0)).logical_and_(tokens.lt(placement.shape()[0]));
  const at::Tensor rows = at::embedding(weight, (tokens - mine.begin).masked_fill(on_another, 0));
  return leave_products(rows.masked_fill(elsewhere.unsqueeze(-1), 0), *axis_);
}

void EmbeddingImpl::check_cut(const LayerCut& cut, const TensorAxis& axis,
                              const std::string& name) const {
  check_not_cut(axis_, name);
  if (cut.kind != CutKind::vocabulary)
    throw UsageError("'{}' is an embedding, which is cut by vocabulary and not by columns or rows",
                     name);
  check_vocabulary(weight, axis, name);
}

void EmbeddingImpl::cut(const LayerCut& cut, const std::shared_ptr<TensorAxis>& axis,
                        const std::string& name) {
  check_cut(cut, *axis, name);
  cut_parameters_.push_back(cut_vocabulary(weight, *axis));
  cut_name_ = name;
  axis_ = axis;
}

void EmbeddingImpl::save(torch::serialize::OutputArchive& archive) const {
  if (axis_ != nullptr) internal::refuse_file("torch::save()", cut_name_, *axis_);
  Module::save(archive);
}

void EmbeddingImpl::load(torch::serialize::InputArchive& archive) {
  if (axis_ != nullptr) internal::refuse_file("torch::load()", cut_name_, *axis_);
  Module::load(archive);
}

}  // namespace lockstep::nn
