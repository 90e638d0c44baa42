// torch::nn's Linear and Embedding, but for their first weights, which a large model is not to draw
// twice, nor from the generator that the user's program draws from; and that they can be cut over a
// tensor axis.
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

  // [..., in] to [..., out], as far as the layer's cut leaves them whole.
  at::Tensor forward(const at::Tensor& x);

  // By columns, rows, or vocabulary: then it has no forward(), as its rows are for
  // vocab_parallel_cross_entropy().
  void check_cut(const LayerCut& cut, const TensorAxis& axis,
                 const std::string& name) const override;
  void cut(const LayerCut& cut, const std::shared_ptr<TensorAxis>& axis,
           const std::string& name) override;
  std::vector<CutParameter> cut_parameters() const override { return cut_parameters_; }
  const std::shared_ptr<TensorAxis>& axis() const { return axis_; }  // null where it is not cut

  at::Tensor weight;  // [out, in], or this rank's part
  at::Tensor bias;    // [out], or this rank's part; undefined where there is none

 private:
  friend std::vector<at::Tensor> linears(const at::Tensor& x,
                                         const std::vector<LinearImpl*>& layers);

  void cut_columns();
  void cut_rows();
  at::Tensor all_outputs(const at::Tensor& y) const;

  LayerCut cut_;
  std::shared_ptr<TensorAxis> axis_;
  std::vector<CutParameter> cut_parameters_;
};

TORCH_MODULE(Linear);

// The products of one to three layers with one input, each as its forward() gives it. Where they
// are cut by columns, what goes between ranks goes once for all of them.
std::vector<at::Tensor> linears(const at::Tensor& x, const std::vector<LinearImpl*>& layers);

// Row t of the weight for token t. The weight is uninitialised memory.
class EmbeddingImpl : public torch::nn::Module, public CuttableLayer {
 public:
  EmbeddingImpl(std::int64_t rows, std::int64_t width);

  at::Tensor forward(const at::Tensor& tokens);  // [...] of int64 to [..., width]

  // By vocabulary.
  void check_cut(const LayerCut& cut, const TensorAxis& axis,
                 const std::string& name) const override;
  void cut(const LayerCut& cut, const std::shared_ptr<TensorAxis>& axis,
           const std::string& name) override;
  std::vector<CutParameter> cut_parameters() const override { return cut_parameters_; }
  const std::shared_ptr<TensorAxis>& axis() const { return axis_; }  // null where it is not cut

  at::Tensor weight;  // [rows, width], or this rank's rows

 private:
  std::shared_ptr<TensorAxis> axis_;
  std::vector<CutParameter> cut_parameters_;
};

TORCH_MODULE(Embedding);

}  // namespace lockstep::nn
