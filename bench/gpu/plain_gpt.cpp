// GPT-2 in plain torch::nn on one GPU, with our three lines: measures what a user's own model gains
// or loses by them. Trains as pytorch.py does: weights in float32, the forward pass under autocast
// to bfloat16, AdamW, gradients clipped. Argument: the number of steps. Prints a JSON object with
// the milliseconds of each step.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include <lockstep/device/autocast.h>
#include <lockstep/distributed/distributed.h>

#include "../training/torch_gpt.h"

int main(int argc, char** argv) {
  using namespace lockstep;
  const int num_steps = argc > 1 ? std::atoi(argv[1]) : 25;
  const bench::GptShape shape = {
      .vocabulary = 50304, .width = 768, .layers = 12, .heads = 12, .tokens = 1024};
  torch::manual_seed(1);

  auto dist = setup_distributed();
  auto model = dist.wrap_model<bench::TorchGpt>(shape);
  auto adamw = dist.make_optimizer(model, optim::AdamWOptions{}, /*weight_decay=*/0.1);

  const auto tokens = at::randint(shape.vocabulary, {64, shape.tokens + 1}, at::kLong);
  const auto inputs = tokens.narrow(1, 0, shape.tokens).contiguous().to(dist.device());
  const auto targets = tokens.narrow(1, 1, shape.tokens).contiguous().to(dist.device());
  double loss_value = 0;
  std::printf("{\"ms\": [");
  for (int step = 0; step < num_steps; ++step) {
    const auto begin = std::chrono::steady_clock::now();
    adamw->zero_grad();
    at::Tensor loss;
    {
      const device::Autocast bf16(dist.device().type(), at::kBFloat16);
      loss = model->forward(inputs, targets);
    }
    loss.backward();
    const at::Tensor factor = optim::clip_factor(dist.gradient_norm(model), 1.0);
    adamw->step(3e-4, optim::StepFactor(factor));
    loss_value = loss.item<double>();
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
    std::printf("%s%.3f", step == 0 ? "" : ", ", took.count());
  }
  std::printf("]}\n");
  return std::isfinite(loss_value) ? 0 : 1;
}
