// Trains a model in two stages, each on ranks of its own; ranks of the same stage share the
// samples.
//
//   lockstep run --nproc-per-node 4 ./train_pipeline
//
// On 2 ranks there is one pipeline, on 4 or 6 ranks two or three of them side by side. All print
// the same losses. docs/parallel.md shows train().
#include <cstdio>
#include <exception>

#include <torch/torch.h>

#include <lockstep/lockstep.h>

// The function that the stages learn: hills and valleys. [points, 2] → [points, 1]
torch::Tensor heights_at(const torch::Tensor& points) {
  return torch::sin(3 * points.narrow(1, 0, 1)) * torch::cos(4 * points.narrow(1, 1, 1));
}

// documented: pipeline
namespace nn = torch::nn;
namespace pipeline = lockstep::pipeline;

constexpr int kMicroBatches = 4;

// This rank's layers, under the names that they have in the whole model.
nn::Sequential layers_of(int stage) {
  nn::Sequential layers;
  if (stage == 0) {
    layers->push_back("in", nn::Linear(2, 32));
    layers->push_back("tanh", nn::Tanh());
  } else {
    layers->push_back("middle", nn::Linear(32, 32));
    layers->push_back("tanh", nn::Tanh());
    layers->push_back("out", nn::Linear(32, 1));
  }
  return layers;
}

void train() {
  auto dist = lockstep::setup_distributed(
      {.mode = lockstep::ParallelMode::HYBRID, .model_parallel = {.pipeline = 2}});
  const auto group = dist.mesh().axis("pp");

  // In a job with a pipeline, the model is this rank's stage.
  torch::manual_seed(1);
  auto layers = dist.wrap_model(layers_of(group->rank()));
  auto optimizer = dist.make_optimizer(layers, lockstep::optim::AdamWOptions{});

  // Stages have drawn different weights; from here on all ranks draw the same numbers.
  torch::manual_seed(2);
  const auto points = torch::rand({4096, 2}).mul(2).sub(1).to(dist.device());

  std::vector<torch::Tensor> mine;  // the step's samples of this rank, in micro-batches
  const auto forward = [&](int micro_batch, const std::vector<torch::Tensor>& inputs) {
    const auto& samples = mine[static_cast<std::size_t>(micro_batch)];
    if (group->rank() == 0) return std::vector{layers->forward(samples)};
    return std::vector{
        torch::mse_loss(layers->forward(inputs[0]), heights_at(samples), torch::Reduction::Sum)};
  };
  pipeline::Pipeline pipe(
      pipeline::make_schedule(pipeline::ScheduleKind::zb_h1,
                              {.num_ranks = 2, .num_micro_batches = kMicroBatches}),
      {{group->rank(), {.forward = forward, .parameters = layers->parameters()}}}, group,
      {.device = dist.device()});

  for (int step = 1; step <= 400; ++step) {
    // All stages of a pipeline take the same samples, and the next pipeline takes others.
    const auto order = torch::randperm(4096).to(dist.device());
    const auto batch = points.index_select(0, order.narrow(0, 0, 192));
    const auto share = batch.slice(0, dist.data_rank(), {}, dist.data_size());
    mine = share.chunk(kMicroBatches);
    optimizer->zero_grad();
    dist.backward_passes(
        layers, [&] { return torch::scalar_tensor(pipe.run_step(), torch::kDouble); },
        share.size(0));
    dist.clip_gradients(layers, 1.0);  // by the norm over all stages
    optimizer->step(5e-3);
    if (step % 40 == 0 && dist.is_main())
      std::printf("step %d: loss %.8f\n", step, dist.totals(layers).mean_loss());
  }
}
// documented: end

int main() {
  try {
    train();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_pipeline: %s\n", error.what());
    return 1;
  }
}
