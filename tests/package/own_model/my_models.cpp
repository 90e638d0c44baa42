// Two models. The library's errors are the classes that the program that loads it has as well.
#include <memory>
#include <utility>
#include <vector>

#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <lockstep/base/error.h>
#include <lockstep/train/own_model.h>

namespace {

class Line : public lockstep::data::Dataset {
 public:
  explicit Line(std::int64_t size) : size_(size) {}
  std::int64_t size() const override { return size_; }
  lockstep::data::Batch batch(std::span<const std::int64_t> indices) const override {
    std::vector<float> x;
    for (const std::int64_t index : indices) x.push_back(static_cast<float>(index % 20) / 10 - 1);
    const at::Tensor input = at::tensor(x).unsqueeze(1);
    return {.input = input, .target = 3 * input - 2};
  }

 private:
  std::int64_t size_;
};

struct MyNet {
  explicit MyNet(const lockstep::ModelOptions& options)
      : hidden(options.integer("hidden", 8)), fails(options.boolean("fails", false)) {}

  auto model() const {
    return torch::nn::Sequential(torch::nn::Linear(1, hidden), torch::nn::Linear(hidden, 1));
  }
  lockstep::nn::LossSum loss(const at::Tensor& output, const at::Tensor& target) const {
    if (fails) throw lockstep::UsageError("the library's own mistake, {}", hidden);
    return {.sum = (output - target).square().sum(), .count = output.size(0)};
  }
  auto training_set() const { return std::make_shared<const Line>(41); }
  auto validation_set() const { return std::make_shared<const Line>(7); }
  auto metrics() const {
    using Metric = std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>;
    return std::vector<std::pair<std::string, Metric>>{
        {"close", [](const at::Tensor& output, const at::Tensor& target) {
           return (output - target).abs().lt(0.1).sum();
         }}};
  }

  std::int64_t hidden;
  bool fails;
};

struct Plain {
  explicit Plain(const lockstep::ModelOptions&) {}
  auto model() const { return std::make_shared<torch::nn::LinearImpl>(1, 1); }
  at::Tensor loss(const at::Tensor& output, const at::Tensor& target) const {
    return torch::nn::functional::mse_loss(output, target);
  }
  auto training_set() const { return std::make_shared<const Line>(20); }
};

}  // namespace

LOCKSTEP_MODEL("MyNet", MyNet)
LOCKSTEP_MODEL("a plain line", Plain)
