#include <lockstep/nn/tensor_parallel/tensor_parallel.h>

#include <cmath>

#include <torch/nn/init.h>

#include <lockstep/nn/tensor_parallel/tensor_plan.h>

namespace lockstep::nn {

namespace {

// Draws the same values as torch::nn::Linear.
void draw_weights(LinearImpl& layer) {
  torch::nn::init::kaiming_uniform_(layer.weight, std::sqrt(5.0));
  if (!layer.bias.defined()) return;
  const double bound = 1 / std::sqrt(static_cast<double>(layer.weight.size(1)));
  torch::nn::init::uniform_(layer.bias, -bound, bound);
}

}  // namespace

ColumnParallelLinearImpl::ColumnParallelLinearImpl(std::int64_t in, std::int64_t out,
                                                   const ColumnParallelLinearOptions& options)
    : LinearImpl(in, out, options.bias), options_(options) {
  draw_weights(*this);
}

LayerCut ColumnParallelLinearImpl::planned_cut() const {
  return {.kind = CutKind::column,
          .blocks = options_.blocks,
          .unit = options_.unit,
          .features = options_.gather_output ? Features::whole : Features::cut};
}

RowParallelLinearImpl::RowParallelLinearImpl(std::int64_t in, std::int64_t out,
                                             const RowParallelLinearOptions& options)
    : LinearImpl(in, out, options.bias), options_(options) {
  draw_weights(*this);
}

LayerCut RowParallelLinearImpl::planned_cut() const {
  return {.kind = CutKind::row,
          .features = options_.input_is_parallel ? Features::cut : Features::whole};
}

VocabParallelEmbeddingImpl::VocabParallelEmbeddingImpl(std::int64_t rows, std::int64_t width)
    : EmbeddingImpl(rows, width) {
  torch::nn::init::normal_(weight);
}

int cut_parallel_layers(torch::nn::Module& model, const std::shared_ptr<TensorAxis>& axis) {
  TensorPlan plan;
  internal::for_each_module(model, [&](const std::string& name, const torch::nn::Module& module) {
    if (const auto* const layer = dynamic_cast<const ParallelLayer*>(&module))
      plan.push_back({name, layer->planned_cut()});
  });
  apply_plan(model, plan, axis);
  return static_cast<int>(plan.size());
}

}  // namespace lockstep::nn
