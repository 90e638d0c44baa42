#include <lockstep/nn/linear.h>

#include <algorithm>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>
#include <lockstep/nn/column_products.h>
#include <lockstep/nn/tensor_moves.h>

namespace lockstep::nn {

namespace {

using mesh::Placement;

void check_not_cut(const std::shared_ptr<TensorAxis>& axis, const std::string& name) {
  if (axis != nullptr)
    throw UsageError("'{}' is cut over '{}' already: a layer is cut once", name,
                     axis->group()->name());
}

// Rows of a weight in parts that differ by one at most.
CutParameter cut_vocabulary(at::Tensor& weight, const TensorAxis& axis, const std::string& name) {
  const std::int64_t rows = weight.size(0);
  if (rows < axis.size())
    throw UsageError("'{}' has {} rows, which cannot be cut over the {} ranks of '{}': each needs "
                     "one at least",
                     name, rows, axis.size(), axis.group()->name());
  const Placement::Shape shape = weight.sizes().vec();
  const auto placement = Placement::full(shape).cut_dim(0, axis.rank(), axis.size());
  internal::keep_part(weight, placement, placement.box_shape());
  return {.name = "weight", .parameter = weight, .whole_shape = shape, .placement = placement};
}

}  // namespace

LinearImpl::LinearImpl(std::int64_t in, std::int64_t out, Bias bias)
    : weight(register_parameter("weight", at::empty({out, in}))) {
  if (bias == Bias::added) this->bias = register_parameter("bias", at::empty({out}));
}

at::Tensor LinearImpl::forward(const at::Tensor& x) {
  if (axis_ == nullptr) return at::linear(x, weight, bias);
  if (cut_.kind == CutKind::column) {
    const at::Tensor y = column_products(x, {{weight, bias}}, axis_).front();
    return cut_.features == Features::whole ? gather_features(y, *axis_) : y;
  }
  LOCKSTEP_CHECK(cut_.kind == CutKind::row);
  const at::Tensor mine = cut_.features == Features::whole ? take_features(x, *axis_) : x;
  const at::Tensor y = leave_products(at::linear(mine, weight), *axis_);
  return bias.defined() ? y + bias : y;
}

std::vector<at::Tensor> linears(const at::Tensor& x, const std::vector<LinearImpl*>& layers) {
  const bool by_columns = std::ranges::all_of(layers, [&](const LinearImpl* layer) {
    return layer->axis_ != nullptr && layer->axis_ == layers.front()->axis_ &&
           layer->cut_.kind == CutKind::column && layer->cut_.features == Features::cut;
  });
  std::vector<at::Tensor> results;
  if (by_columns) {
    std::vector<ProductWeights> weights;
    for (const LinearImpl* layer : layers) weights.push_back({layer->weight, layer->bias});
    return column_products(x, weights, layers.front()->axis_);
  }
  for (LinearImpl* layer : layers) results.push_back(layer->forward(x));
  return results;
}

void LinearImpl::cut(const LayerCut& cut, const std::shared_ptr<TensorAxis>& axis,
                     const std::string& name) {
  check_not_cut(axis_, name);
  cut_ = cut;
  axis_ = axis;
  switch (cut.kind) {
    case CutKind::column: return cut_columns(name);
    case CutKind::row: return cut_rows(name);
    case CutKind::vocabulary:
      if (bias.defined())
        throw UsageError("'{}' has a bias, and is to be cut by vocabulary: make it without one",
                         name);
      cut_parameters_.push_back(cut_vocabulary(weight, *axis, name));
      return;
  }
}

void LinearImpl::cut_columns(const std::string& name) {
  const std::int64_t out = weight.size(0), in = weight.size(1);
  const std::int64_t size = axis_->size();
  const std::int64_t per_block = out / cut_.blocks;
  const std::int64_t units = per_block / cut_.unit;
  if (cut_.blocks * units * cut_.unit != out || (units % size != 0 && size % units != 0))
    throw UsageError("the {} outputs of '{}', {} blocks of {} units of {}, cannot be cut over the "
                     "{} ranks of '{}': the units must be a multiple of the ranks, or the ranks of "
                     "the units",
                     out, name, cut_.blocks, units, cut_.unit, size, axis_->group()->name());
  const std::int64_t num_parts = std::min(units, size);
  const int num_holders = static_cast<int>(size / num_parts);
  const int part = axis_->rank() / num_holders;
  const auto add = [&](const char* own_name, at::Tensor& parameter, Placement::Shape whole,
                       Placement::Shape shape) {
    const auto placement =
        Placement::full(std::move(whole)).cut_dim(1, part, static_cast<int>(num_parts));
    const Placement::Shape whole_shape = parameter.sizes().vec();
    internal::keep_part(parameter, placement, shape);
    cut_parameters_.push_back({own_name, parameter, whole_shape, placement, num_holders});
    if (num_holders > 1)
      sum_gradients_over(parameter, axis_->holders_of_part(static_cast<int>(num_parts)));
  };
  add("weight", weight, {cut_.blocks, per_block, in}, {out / num_parts, in});
  if (bias.defined()) add("bias", bias, {cut_.blocks, per_block}, {out / num_parts});
}

void LinearImpl::cut_rows(const std::string& name) {
  const std::int64_t out = weight.size(0), in = weight.size(1);
  const int size = axis_->size();
  if (in % size != 0)
    throw UsageError("the {} inputs of '{}' cannot be cut over the {} ranks of '{}': {} is no "
                     "multiple of {}",
                     in, name, size, axis_->group()->name(), in, size);
  if (cut_.features == Features::whole && axis_->by_positions())
    throw UsageError("'{}' takes its part of whole inputs, and sequence parallelism leaves no rank "
                     "any: cut the layer before it by columns",
                     name);
  const auto placement = Placement::full({out, in}).cut_dim(1, axis_->rank(), size);
  internal::keep_part(weight, placement, placement.box_shape());
  cut_parameters_.push_back({"weight", weight, {out, in}, placement});
  // Added to this rank's positions only.
  if (bias.defined() && axis_->by_positions()) sum_gradients_over(bias, axis_->group());
}

EmbeddingImpl::EmbeddingImpl(std::int64_t rows, std::int64_t width)
    : weight(register_parameter("weight", at::empty({rows, width}))) {}

at::Tensor EmbeddingImpl::forward(const at::Tensor& tokens) {
  if (axis_ == nullptr) return at::embedding(weight, tokens);
  const mesh::Interval mine = cut_parameters_.front().placement.box()[0];
  const at::Tensor elsewhere = tokens.lt(mine.begin).logical_or(tokens.ge(mine.end));
  const at::Tensor rows = at::embedding(weight, (tokens - mine.begin).masked_fill(elsewhere, 0));
  return leave_products(rows.masked_fill(elsewhere.unsqueeze(-1), 0), *axis_);
}

void EmbeddingImpl::cut(const LayerCut& cut, const std::shared_ptr<TensorAxis>& axis,
                        const std::string& name) {
  check_not_cut(axis_, name);
  if (cut.kind != CutKind::vocabulary)
    throw UsageError("'{}' is an embedding, which is cut by vocabulary and not by columns or rows",
                     name);
  cut_parameters_.push_back(cut_vocabulary(weight, *axis, name));
  axis_ = axis;
}

}  // namespace lockstep::nn
