// A model for `lockstep train`: a small net learns to add numbers. The library has the model, its
// loss and its data; predict_sums.json says how it is trained.
//
//   lockstep train examples/predict_sums.json --nproc-per-node 2
//       --set model.library=build/dev/examples/libpredict_sums.so
#include <torch/torch.h>

#include <lockstep/lockstep.h>

struct Net : torch::nn::Module {
  Net(std::int64_t numbers, std::int64_t hidden)
      : first(register_module("first", torch::nn::Linear(numbers, hidden))),
        second(register_module("second", torch::nn::Linear(hidden, 1))) {}
  torch::Tensor forward(const torch::Tensor& numbers) {  // [samples, numbers] → [samples, 1]
    return second->forward(torch::relu(first->forward(numbers)));
  }

  torch::nn::Linear first, second;
};

// Numbers from 0 to 1, and their sum. A sample is a function of its index alone.
class Sums : public torch::data::datasets::Dataset<Sums> {
 public:
  Sums(std::int64_t numbers, std::size_t size, std::uint64_t seed)
      : all_(torch::rand({static_cast<std::int64_t>(size), numbers},
                         torch::make_generator<torch::CPUGeneratorImpl>(seed))) {}
  torch::data::Example<> get(std::size_t index) override {
    const auto numbers = all_[static_cast<std::int64_t>(index)];
    return {numbers, numbers.sum().unsqueeze(0)};
  }
  torch::optional<std::size_t> size() const override {
    return static_cast<std::size_t>(all_.size(0));
  }

 private:
  torch::Tensor all_;
};

struct PredictSums {
  explicit PredictSums(const lockstep::ModelOptions& options)
      : numbers(options.integer("numbers", 4)), hidden(options.integer("hidden", 16)) {}

  auto model() const { return std::make_shared<Net>(numbers, hidden); }
  torch::Tensor loss(const torch::Tensor& output, const torch::Tensor& target) const {
    return torch::mse_loss(output, target);
  }
  auto training_set() const { return Sums(numbers, 512, 1); }
  auto validation_set() const { return Sums(numbers, 64, 2); }

  std::int64_t numbers, hidden;
};

LOCKSTEP_MODEL("PredictSums", PredictSums)
