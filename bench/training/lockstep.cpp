// Times our own training step. Arguments: what to time, the steps to time, and those of the
// warm-up. Runs under `lockstep run`, or alone as one rank. What to time:
//   plain      our GPT and our optimizer, ranks on their own
//   ddp        the same, data parallel
//   fsdp       the same, with parameters, gradients and optimizer state cut among the ranks
//   alternate  these three in turn, step by step: what data parallelism adds, and what sharding
//   torch      the GPT of torch::nn and torch::optim::AdamW, made data parallel in three lines
#include <memory>
#include <span>

#include <lockstep/distributed/distributed.h>
#include <lockstep/models/make_model.h>
#include <lockstep/optim/optimizer.h>
#include <lockstep/parallel/data_parallel/model_parameters.h>
#include <lockstep/parallel/shard/fully_sharded_data_parallel.h>

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

std::shared_ptr<models::LanguageModel> make_gpt() {
  return models::make_model({.vocab_size = kVocabulary,
                             .hidden_size = kWidth,
                             .num_layers = kLayers,
                             .num_heads = kHeads,
                             .max_positions = kTokens},
                            1);
}

std::vector<optim::ParameterGroup> decaying(const torch::nn::Module& model) {
  return optim::decay_groups(data_parallel::trained_parameters(model), kWeightDecay,
                             optim::DecayRule::everything);
}

constexpr optim::AdamWOptions kAdamW{.betas = {kBeta1, kBeta2}};

// A step with our model and optimizer; derived classes compute the gradients.
class OurTraining : public Training {
 public:
  void step(const Batch& batch) final {
    clock_.begin();
    optimizer_->zero_grad();
    const auto loss = model_->loss(batch.inputs, batch.targets);
    clock_.end_of(StepClock::forward);
    backward(loss);
    clock_.end_of(StepClock::backward);
    optimizer_->step(kLearningRate);
    clock_.end_of(StepClock::update);
    clock_.end();
    loss_ = loss.sum.item<double>() / static_cast<double>(loss.count);
  }

 protected:
  virtual void backward(const nn::LossSum& loss) = 0;

  std::shared_ptr<models::LanguageModel> model_ = make_gpt();
  std::unique_ptr<optim::Optimizer> optimizer_;
};

class AloneTraining final : public OurTraining {
 public:
  AloneTraining() { optimizer_ = optim::make_optimizer(kAdamW, decaying(*model_)); }

 private:
  void backward(const nn::LossSum& loss) override { (loss.sum / loss.count).backward(); }
};

class DataParallelTraining final : public OurTraining {
 public:
  explicit DataParallelTraining(DistributedManager manager) : manager_(std::move(manager)) {
    manager_.wrap_model(model_);
    optimizer_ = manager_.make_optimizer(model_, kAdamW, decaying(*model_));
  }

 private:
  void backward(const nn::LossSum& loss) override {
    manager_.backward(model_, loss.sum, loss.count);
  }

  DistributedManager manager_;
};

// Runs beside data parallelism in one process, so it has no manager of its own.
class ShardedTraining final : public OurTraining {
 public:
  explicit ShardedTraining(const std::shared_ptr<comm::Communicator>& world)
      : sharded_(*model_, shard::shard_over(world)) {
    optimizer_ = sharded_.make_optimizer(kAdamW, decaying(*model_));
  }

 private:
  void backward(const nn::LossSum& loss) override { sharded_.backward(loss.sum, loss.count); }

  shard::FullyShardedDataParallel sharded_;
};

class TorchTraining final : public Training {
 public:
  explicit TorchTraining(DistributedManager manager)
      : model_(manager.wrap_model<TorchGpt>()),
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
    all.push_back({"lockstep_plain", std::make_unique<AloneTraining>()});
  if (what == "ddp" || what == "alternate")
    all.push_back({"lockstep_ddp", std::make_unique<DataParallelTraining>(manager)});
  if (what == "fsdp" || what == "alternate")
    all.push_back({"lockstep_fsdp", std::make_unique<ShardedTraining>(manager.world())});
  if (what == "torch") all.push_back({"lockstep_torch", std::make_unique<TorchTraining>(manager)});
  if (all.empty()) {
    std::fprintf(stderr, "cannot time '%s': say plain, ddp, fsdp, alternate or torch\n",
                 what.c_str());
    return 2;
  }
  const Batch batch = batch_of(manager.rank());
  for (int step = 0; step < count.warm_up + count.timed; ++step)
    for (const Named& named : all) {
      // A barrier before each turn, so that no rank waits for the others' earlier work.
      if (all.size() > 1) manager.barrier();
      named.training->step(batch);
    }
  for (const Named& named : all)
    named.training->clock().report(named.who, manager.rank(), manager.world_size(), count,
                                   named.training->loss());
  manager.barrier();
}
