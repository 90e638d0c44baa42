// Linear and Embedding like those of torch::nn, with two differences. Their weights are not
// initialised: a large model should neither draw them twice nor advance the generator of the user's
// program. And they can be cut over a tensor axis.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <lockstep/nn/tensor_parallel/tensor_axis.h>

namespace lockstep::nn {

enum class Bias { none, added };

// x · weightᵀ + bias. The weights are uninitialised memory.
class LinearImpl : public torch::nn::Module, public CuttableLayer {
 public:
  LinearImpl(std::int64_t in, std::int64_t out, Bias bias);

  // Takes [..., in] and returns [..., out]; if the layer is cut, a dim may be this rank's part.
  at::Tensor forward(const at::Tensor& x);

  // The layer can be cut by columns, rows, or vocabulary. Cut by vocabulary it has no forward(),
  // because its rows are for vocab_parallel_cross_entropy().
  void check_cut(const LayerCut& cut, const TensorAxis& axis,
                 const std::string& name) const override;
  void cut(const LayerCut& cut, const std::shared_ptr<TensorAxis>& axis,
           const std::string& name) override;
  std::vector<CutParameter> cut_parameters() const override { return cut_parameters_; }
  const std::shared_ptr<TensorAxis>& axis() const { return axis_; }  // null if it is not cut

  // UsageError once each rank has a part.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  at::Tensor weight;  // [out, in], or this rank's part
  at::Tensor bias;    // [out], or this rank's part; may be undefined

 private:
  friend std::vector<at::Tensor> linears(const at::Tensor& x,
                                         const std::vector<LinearImpl*>& layers);

  void cut_columns();
  void cut_rows();
  void check_parts() const;
  at::Tensor all_outputs(const at::Tensor& y) const;

  LayerCut cut_;
  std::string cut_name_;  // in the model
  std::shared_ptr<TensorAxis> axis_;
  std::vector<CutParameter> cut_parameters_;
};

TORCH_MODULE(Linear);

// Applies one to three layers to one input, as their forward() does. If they are cut by columns,
// ranks communicate once for all of them.
std::vector<at::Tensor> linears(const at::Tensor& x, const std::vector<LinearImpl*>& layers);

// Row t of the weight for token t. The weight is uninitialised memory.
class EmbeddingImpl : public torch::nn::Module, public CuttableLayer {
 public:
  EmbeddingImpl(std::int64_t rows, std::int64_t width);

  at::Tensor forward(const at::Tensor& tokens);  // [...] of int64 to [..., width]

  // An embedding can be cut by vocabulary only.
  void check_cut(const LayerCut& cut, const TensorAxis& axis,
                 const std::string& name) const override;
  void cut(const LayerCut& cut, const std::shared_ptr<TensorAxis>& axis,
           const std::string& name) override;
  std::vector<CutParameter> cut_parameters() const override { return cut_parameters_; }
  const std::shared_ptr<TensorAxis>& axis() const { return axis_; }  // null if it is not cut

  // As LinearImpl's.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  at::Tensor weight;  // [rows, width], or this rank's rows

 private:
  std::string cut_name_;  // in the model
  std::shared_ptr<TensorAxis> axis_;
  std::vector<CutParameter> cut_parameters_;
};

TORCH_MODULE(Embedding);

}  // namespace lockstep::nn
