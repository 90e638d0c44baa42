// Our own training step. Arguments: what to time, the steps to time, and those of the warm-up. Runs
// under `lockstep run`, or alone as one rank. What to time:
//   plain      our GPT and our optimizer, ranks on their own
//   ddp        the same, data parallel
//   alternate  both in turn, step by step: what data parallelism adds
//   torch      the GPT of torch::nn and torch::optim::AdamW, made data parallel in three lines
#include <memory>
#include <optional>
#include <span>

#include <lockstep/distributed/distributed.h>
#include <lockstep/models/make_model.h>
#include <lockstep/optim/optimizer.h>

#include "torch_gpt.h"

namespace {

using namespace lockstep;
using namespace lockstep::bench;

struct Batch {
  at::Tensor inputs, targets;  // [batch, tokens]
};

Batch batch_of(int rank) {
  at::manual_seed(static_cast<std::uint64_t>(1 + rank));
  const auto tokens = at::randint(kVocabulary, {kBatch, kTokens + 1}, at::kLong);
  return {tokens.narrow(1, 0, kTokens).contiguous(), tokens.narrow(1, 1, kTokens).contiguous()};
}

// A model, its optimizer and its times.
class Training {
 public:
  virtual ~Training() = default;
  virtual void step(const Batch& batch) = 0;

  double loss() const { return loss_; }
  const StepClock& clock() const { return clock_; }

 protected:
  StepClock clock_;
  double loss_ = 0;
};

class OurTraining final : public Training {
 public:
  // Alone without a manager.
  explicit OurTraining(std::optional<DistributedManager> manager)
      : manager_(std::move(manager)),
        model_(models::make_model({.vocab_size = kVocabulary,
                                   .hidden_size = kWidth,
                                   .num_layers = kLayers,
                                   .num_heads = kHeads,
                                   .max_positions = kTokens},
                                  1)) {
    if (manager_) model_ = manager_->wrap_model(model_);
    std::vector<optim::NamedParameter> parameters;
    for (const auto& item : model_->named_parameters())
      parameters.push_back({item.key(), item.value()});
    optimizer_ = optim::make_optimizer(
        optim::AdamWOptions{.betas = {kBeta1, kBeta2}},
        optim::decay_groups(std::move(parameters), kWeightDecay, optim::DecayRule::everything));
  }

  void step(const Batch& batch) override {
    clock_.begin();
    optimizer_->zero_grad();
    const auto loss = model_->loss(batch.inputs, batch.targets);
    clock_.end_of(StepClock::forward);
    if (manager_)
      manager_->backward(model_, loss.sum, loss.count);
    else
      (loss.sum / loss.count).backward();
    clock_.end_of(StepClock::backward);
    optimizer_->step(kLearningRate);
    clock_.end_of(StepClock::update);
    clock_.end();
    loss_ = loss.sum.item<double>() / static_cast<double>(loss.count);
  }

 private:
  std::optional<DistributedManager> manager_;
  std::shared_ptr<models::LanguageModel> model_;
  std::unique_ptr<optim::Optimizer> optimizer_;
};

class TorchTraining final : public Training {
 public:
  explicit TorchTraining(DistributedManager manager)
      : model_(manager.wrap_model(TorchGpt())),
        optimizer_(model_->parameters(), torch::optim::AdamWOptions(kLearningRate)
                                             .betas({kBeta1, kBeta2})
                                             .weight_decay(kWeightDecay)) {}

  void step(const Batch& batch) override {
    clock_.begin();
    optimizer_.zero_grad();
    const auto loss = model_(batch.inputs, batch.targets);
    clock_.end_of(StepClock::forward);
    loss.backward();
    clock_.end_of(StepClock::backward);
    optimizer_.step();
    clock_.end_of(StepClock::update);
    clock_.end();
    loss_ = loss.item<double>();
  }

 private:
  TorchGpt model_;
  torch::optim::AdamW optimizer_;
};

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "ddp";
  const StepCount count = step_count(argc, argv, 2);
  at::set_num_threads(1);
  auto manager = setup_distributed({.device_type = c10::kCPU});
  struct Named {
    const char* who;
    std::unique_ptr<Training> training;
  };
  std::vector<Named> all;
  if (what == "plain" || what == "alternate")
    all.push_back({"lockstep_plain", std::make_unique<OurTraining>(std::nullopt)});
  if (what == "ddp" || what == "alternate")
    all.push_back({"lockstep_ddp", std::make_unique<OurTraining>(manager)});
  if (what == "torch") all.push_back({"lockstep_torch", std::make_unique<TorchTraining>(manager)});
  if (all.empty()) {
    std::fprintf(stderr, "cannot time '%s': say plain, ddp, alternate or torch\n", what.c_str());
    return 2;
  }
  const Batch batch = batch_of(manager.rank());
  for (int step = 0; step < count.warm_up + count.timed; ++step)
    for (const Named& named : all) {
      // Nobody waits for what another rank did before.
      if (all.size() > 1) manager.barrier();
      named.training->step(batch);
    }
  for (const Named& named : all)
    named.training->clock().report(named.who, manager.rank(), manager.world_size(), count,
                                   named.training->loss());
  manager.barrier();
}
