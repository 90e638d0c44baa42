// Layers that are cut over a tensor axis, for modules of one's own:
//
//   struct ParallelMlp : torch::nn::Module {
//     ParallelMlp(int64_t hidden, int64_t inner)
//         : gate_proj(register_module("gate_proj", ColumnParallelLinear(hidden, inner))),
//           down_proj(register_module("down_proj", RowParallelLinear(inner, hidden))) {}
//     …
//
// They are made like torch::nn's, with weights drawn like theirs, and are whole until
// cut_parallel_layers() is given the axis: a model of them runs as it is in one process.
#pragma once

#include <cstdint>
#include <memory>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <lockstep/nn/tensor_parallel/linear.h>
#include <lockstep/nn/tensor_parallel/tensor_plan.h>

namespace lockstep::nn {

// A layer that says itself how it is to be cut.
class ParallelLayer {
 public:
  virtual ~ParallelLayer() = default;
  virtual LayerCut planned_cut() const = 0;
};

struct ColumnParallelLinearOptions {
  Bias bias = Bias::added;
  bool gather_output = false;  // all outputs on every rank, instead of a part on each
  std::int64_t blocks = 1;     // as LayerCut
  std::int64_t unit = 1;       // as LayerCut
};

// x · weightᵀ + bias, each rank some of the outputs.
class ColumnParallelLinearImpl : public LinearImpl, public ParallelLayer {
 public:
  ColumnParallelLinearImpl(std::int64_t in, std::int64_t out,
                           const ColumnParallelLinearOptions& options = {});
  LayerCut planned_cut() const override;

 private:
  ColumnParallelLinearOptions options_;
};

TORCH_MODULE(ColumnParallelLinear);

struct RowParallelLinearOptions {
  Bias bias = Bias::added;
  bool input_is_parallel = true;  // a part of the inputs on each rank, as a column gives them
};

// x · weightᵀ + bias, each rank from some of the inputs; the bias is added once.
class RowParallelLinearImpl : public LinearImpl, public ParallelLayer {
 public:
  RowParallelLinearImpl(std::int64_t in, std::int64_t out,
                        const RowParallelLinearOptions& options = {});
  LayerCut planned_cut() const override;

 private:
  RowParallelLinearOptions options_;
};

TORCH_MODULE(RowParallelLinear);

// Row t of the weight for token t, each rank those of some tokens.
class VocabParallelEmbeddingImpl : public EmbeddingImpl, public ParallelLayer {
 public:
  VocabParallelEmbeddingImpl(std::int64_t rows, std::int64_t width);
  LayerCut planned_cut() const override { return {.kind = CutKind::vocabulary}; }
};

TORCH_MODULE(VocabParallelEmbedding);

// Cuts every such layer of a model, as apply_plan() does those of a plan. Returns how many.
int cut_parallel_layers(torch::nn::Module& model, const std::shared_ptr<TensorAxis>& axis);

}  // namespace lockstep::nn
