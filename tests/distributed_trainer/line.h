// The smallest training task: a linear layer learns a straight line.
#pragma once

#include <ATen/ATen.h>
#include <torch/data/datasets/base.h>
#include <torch/nn/modules/linear.h>

namespace lockstep {

// A dataset's size is a std::optional or, before LibTorch 2.5, LibTorch's own optional.
struct Any;
using Size = decltype(std::declval<const torch::data::datasets::BatchDataset<Any>&>().size());

// Sample k is the input [k/10, 1] and the target 3·k/10 − 2, which a linear layer can learn.
class Line : public torch::data::datasets::Dataset<Line> {
 public:
  explicit Line(std::size_t size) : size_(size) {}
  torch::data::Example<> get(std::size_t index) override {
    const float x = static_cast<float>(index) / 10;
    return {at::tensor({x, 1.0f}), at::tensor({3 * x - 2})};
  }
  Size size() const override { return size_; }

 private:
  std::size_t size_;
};

struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("layer", layer);
    const c10::NoGradGuard no_grad;
    layer->weight.fill_(0.5);
  }
  at::Tensor forward(const at::Tensor& input) { return layer->forward(input); }
  torch::nn::Linear layer{torch::nn::LinearOptions(2, 1).bias(false)};
};
TORCH_MODULE(Net);

inline at::Tensor squares(const at::Tensor& output, const at::Tensor& target) {
  return (output - target).square();
}

inline const auto kMean = [](const at::Tensor& output, const at::Tensor& target) {
  return squares(output, target).mean();
};

}  // namespace lockstep
