// Follows the recipes "to add an optimizer" and "a schedule" of ARCHITECTURE.md from outside the
// tree, and trains a language model with both from a config.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include <lockstep/optim/elementwise_optimizer.h>
#include <lockstep/optim/schedules/schedule.h>
#include <lockstep/train/config/config.h>
#include <lockstep/train/train_language_model.h>

namespace {

namespace optim = lockstep::optim;

// Each element moves by the learning rate, against the sign of its momentum.
struct SignumOptions {
  double momentum = 0.5;

  static constexpr optim::StepKind kKind = optim::StepKind::elementwise;
  void describe(optim::OptionKeys& keys) {
    keys.number({.name = "momentum", .meaning = "how much of the average each step keeps"},
                momentum, {.lowest = 0, .highest = 1, .below_highest = true});
  }
  std::vector<std::string> state_names() const { return {"average"}; }
  std::unique_ptr<optim::Optimizer> make(std::vector<optim::ParameterGroup> groups,
                                         std::shared_ptr<optim::Parts> parts) const;
};

class Signum final : public optim::ElementwiseOptimizer {
 public:
  Signum(std::vector<optim::ParameterGroup> groups, const SignumOptions& options)
      : ElementwiseOptimizer(std::move(groups), options.state_names()), options_(options) {}

 private:
  template <typename T>
  void move_stretch(const optim::StepNumbers& numbers, const optim::Stretch<T>& stretch) const {
    const T momentum = static_cast<T>(options_.momentum);
    const T rate = static_cast<T>(numbers.learning_rate);
    for (std::int64_t i = 0; i < stretch.count; ++i) {
      T& average = stretch.state[0][i];
      average = momentum * average + (1 - momentum) * stretch.gradient[i];
      stretch.weight[i] -= average > 0 ? rate : average < 0 ? -rate : T{0};
    }
  }
  void update(const optim::StepNumbers& numbers,
              const optim::Stretch<float>& stretch) const override {
    move_stretch(numbers, stretch);
  }
  void update(const optim::StepNumbers& numbers,
              const optim::Stretch<double>& stretch) const override {
    move_stretch(numbers, stretch);
  }
  void update(const std::vector<optim::ParameterStep>& elsewhere,
              const optim::StepFactor&) const override {
    for (const optim::ParameterStep& step : elsewhere) {
      const at::Tensor& average = step.state->front();
      average.mul_(options_.momentum).add_(step.gradient, 1 - options_.momentum);
      step.weight.add_(average.sign(), -step.numbers.learning_rate);
    }
  }

  SignumOptions options_;
};

std::unique_ptr<optim::Optimizer> SignumOptions::make(std::vector<optim::ParameterGroup> groups,
                                                      std::shared_ptr<optim::Parts>) const {
  return std::make_unique<Signum>(std::move(groups), *this);
}

// Halves the learning rate every `every` steps.
struct HalvingOptions {
  std::int64_t every = 10;

  void describe(optim::OptionKeys& keys, const optim::RunFacts&) {
    keys.integer({.name = "every", .meaning = "steps between two halvings"}, every, {.lowest = 1});
  }
  std::vector<optim::OptionMistake> mistakes(double) const { return {}; }
  std::unique_ptr<optim::Schedule> make(double base_lr) const;
};

class Halving final : public optim::Schedule {
 public:
  Halving(std::int64_t every, double base_lr) : every_(every), base_lr_(base_lr) {}
  double learning_rate(std::int64_t step) const override {
    double rate = base_lr_;
    for (std::int64_t i = every_; i <= step; i += every_) rate /= 2;
    return rate;
  }

 private:
  std::int64_t every_;
  double base_lr_;
};

std::unique_ptr<optim::Schedule> HalvingOptions::make(double base_lr) const {
  return std::make_unique<Halving>(every, base_lr);
}

constexpr const char* kConfig = R"({
  "model": {"family": "gpt2", "hidden_size": 32, "num_layers": 2, "num_heads": 2},
  "data": {"train": "text.txt", "sequence_length": 32},
  "output": "run",
  "train_batch_size": 8,
  "max_steps": 60,
  "optimizer": {"type": "Signum", "params": {"lr": 2e-3, "momentum": 0.8}},
  "scheduler": {"type": "Halving", "params": {"every": 25}}
})";

}  // namespace

int main() {
  optim::register_optimizer({"Signum"}, SignumOptions{});
  optim::register_schedule("Halving", HalvingOptions{});
  std::filesystem::remove_all("run");
  std::ofstream text("text.txt");
  for (int i = 0; i < 2000; ++i) text << "the cat sat on mat " << i % 7 << ".\n";
  text.close();
  std::ofstream("config.json") << kConfig;

  const lockstep::train::TrainConfig config = lockstep::train::load_config("config.json");
  const auto result = lockstep::train::train_language_model(config, /*output_fd=*/1, nullptr);
  // If all bytes were equally likely, the loss would be 5.5.
  std::printf("after step %ld the loss is %g\n", static_cast<long>(result.step), result.loss);
  return result.step == 60 && result.loss < 3 ? 0 : 1;
}
