// Layers that are cut over a tensor axis, for a user's own modules:
//
//   struct ParallelMlp : torch::nn::Module {
//     ParallelMlp(int64_t hidden, int64_t inner)
//         : gate_proj(register_module("gate_proj", ColumnParallelLinear(hidden, inner))),
//           down_proj(register_module("down_proj", RowParallelLinear(inner, hidden))) {}
//     …
//
// They are constructed like torch::nn's, draw their weights like them, and are whole until
// cut_parallel_layers() gets the axis: a model of them runs unchanged in one process.
#pragma once

#include <cstdint>
#include <memory>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <lockstep/nn/tensor_parallel/linear.h>
#include <lockstep/nn/tensor_parallel/tensor_plan.h>

namespace lockstep::nn {

// A layer that knows how it is to be cut.
class ParallelLayer {
 public:
  virtual ~ParallelLayer() = default;
  virtual LayerCut planned_cut() const = 0;
};

struct ColumnParallelLinearOptions {
  Bias bias = Bias::added;
  bool gather_output = false;  // puts all outputs on every rank, instead of a part on each
  std::int64_t blocks = 1;     // as LayerCut
  std::int64_t unit = 1;       // as LayerCut
};

// Computes x · weightᵀ + bias; each rank computes some of the outputs.
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
  // each rank has a part of the inputs, as a column layer returns it
  bool input_is_parallel = true;
};

// Computes x · weightᵀ + bias; each rank uses some of the inputs, and the bias is added once.
class RowParallelLinearImpl : public LinearImpl, public ParallelLayer {
 public:
  RowParallelLinearImpl(std::int64_t in, std::int64_t out,
                        const RowParallelLinearOptions& options = {});
  LayerCut planned_cut() const override;

 private:
  RowParallelLinearOptions options_;
};

TORCH_MODULE(RowParallelLinear);

// Row t of the weight for token t; each rank has the rows of some tokens.
class VocabParallelEmbeddingImpl : public EmbeddingImpl, public ParallelLayer {
 public:
  VocabParallelEmbeddingImpl(std::int64_t rows, std::int64_t width);
  LayerCut planned_cut() const override { return {.kind = CutKind::vocabulary}; }
};

TORCH_MODULE(VocabParallelEmbedding);

// Cuts all such layers of a model, as apply_plan() does with the layers of a plan. Returns their
// number.
int cut_parallel_layers(torch::nn::Module& model, const std::shared_ptr<TensorAxis>& axis);

}  // namespace lockstep::nn
