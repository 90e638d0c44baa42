// A training loop as you would write it for one process, and the few lines that spread it over
// many.
//
//   lockstep run --nproc-per-node 2 ./train_own_loop
//
// Alone, or under torchrun --no-python, mpirun or srun, it runs the same. A step has the same
// points however many ranks share them, so any number of ranks prints the same losses.
#include <cstdio>
#include <exception>

#include <torch/torch.h>

#include <lockstep/lockstep.h>

constexpr std::int64_t kBatch = 128;  // of all ranks together

struct Net : torch::nn::Module {
  Net() { register_module("layers", layers); }
  torch::Tensor forward(const torch::Tensor& points) { return layers->forward(points); }

  torch::nn::Sequential layers{torch::nn::Linear(2, 32), torch::nn::Tanh(),
                               torch::nn::Linear(32, 32), torch::nn::Tanh(),
                               torch::nn::Linear(32, 1)};
};

// The function that the net learns: hills and valleys. [points, 2] → [points, 1]
torch::Tensor heights_at(const torch::Tensor& points) {
  return torch::sin(3 * points.narrow(1, 0, 1)) * torch::cos(4 * points.narrow(1, 1, 1));
}

void train() {
  // 1. Joins the other ranks, and chooses this one's device.
  auto dist = lockstep::setup_distributed({.mode = lockstep::ParallelMode::DDP});

  // All ranks use the same seed, so they have the same points and shuffle them alike.
  torch::manual_seed(1);
  const auto points = torch::rand({4096, 2}).mul(2).sub(1).to(dist.device());
  const auto heights = heights_at(points);

  // 2. Every rank begins with the weights of rank 0, and backward() sums gradients over the ranks.
  auto model = dist.wrap_model<Net>();
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(5e-3));

  for (int epoch = 1; epoch <= 10; ++epoch) {
    const auto batches = torch::randperm(points.size(0)).to(dist.device()).split(kBatch);
    double loss_sum = 0;
    for (const auto& batch : batches) {
      // 3. Takes this rank's share of the batch: every n-th sample for n ranks.
      const auto mine = batch.slice(0, dist.rank(), {}, dist.world_size());

      optimizer.zero_grad();
      const auto loss = torch::mse_loss(model->forward(points.index_select(0, mine)),
                                        heights.index_select(0, mine), torch::Reduction::Sum);
      // Replaces loss.backward(): gradients are those of the mean over the samples of all ranks,
      // even if a batch of 128 does not divide evenly among them.
      dist.backward(model, loss, mine.size(0));
      optimizer.step();
      loss_sum += loss.item<double>();
    }
    // All ranks take part in the sum; the main rank prints it.
    const double loss = dist.sum(loss_sum) / static_cast<double>(points.size(0));
    if (dist.is_main()) std::printf("epoch %d: loss %.8f\n", epoch, loss);
  }
}

int main() {
  try {
    train();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_own_loop: %s\n", error.what());
    return 1;
  }
}
