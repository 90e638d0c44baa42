// A plain training loop in LibTorch's C++, without Lockstep. Arguments: the steps to time, and
// those of the warm-up. If `lockstep run` starts it, it is several processes that know nothing of
// each other.
#include <cstdlib>

#include "torch_gpt.h"

namespace {

// Without a launcher there is one process.
int variable(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::atoi(text) : otherwise;
}

}  // namespace

int main(int argc, char** argv) {
  using namespace lockstep::bench;
  const StepCount count = step_count(argc, argv, 1);
  at::set_num_threads(1);
  torch::manual_seed(1);
  TorchGpt model;
  torch::optim::AdamW optimizer(
      model->parameters(),
      torch::optim::AdamWOptions(kLearningRate).betas({kBeta1, kBeta2}).weight_decay(kWeightDecay));
  const auto tokens = at::randint(kVocabulary, {kBatch, kTokens + 1}, at::kLong);
  const auto inputs = tokens.narrow(1, 0, kTokens).contiguous();
  const auto targets = tokens.narrow(1, 1, kTokens).contiguous();
  StepClock clock;
  double last_loss = 0;
  for (int step = 0; step < count.warm_up + count.timed; ++step) {
    clock.begin();
    optimizer.zero_grad();
    const auto loss = model(inputs, targets);
    clock.end_of(StepClock::forward);
    loss.backward();
    clock.end_of(StepClock::backward);
    optimizer.step();
    clock.end_of(StepClock::update);
    clock.end();
    last_loss = loss.item<double>();
  }
  clock.report("torch_plain", variable("RANK", 0), variable("WORLD_SIZE", 1), count, last_loss);
}
