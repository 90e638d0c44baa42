// Trains two models against each other: a generator learns to draw points of a ring, and a critic
// to tell them from real ones. Each model is wrapped, and has an optimizer of its own.
//
//   lockstep run --nproc-per-node 2 ./train_gan
//
// Alone, or under torchrun --no-python, mpirun or srun, it runs the same, and any number of ranks
// prints the same losses.
#include <cstdio>
#include <exception>

#include <torch/torch.h>

#include <lockstep/lockstep.h>

constexpr std::int64_t kBatch = 96;  // points of a step, of all ranks together
constexpr std::int64_t kNoise = 4;   // numbers that the generator makes a point of

// Plain torch::nn, which knows nothing of ranks.
struct Layers : torch::nn::Module {
  Layers(std::int64_t inputs, std::int64_t outputs)
      : layers(torch::nn::Linear(inputs, 32), torch::nn::Tanh(), torch::nn::Linear(32, 32),
               torch::nn::Tanh(), torch::nn::Linear(32, outputs)) {
    register_module("layers", layers);
  }
  torch::Tensor forward(const torch::Tensor& x) { return layers->forward(x); }

  torch::nn::Sequential layers;
};

// Points at a distance of about 1 from the centre: [points, 2]
torch::Tensor ring(std::int64_t count) {
  const auto angle = 2 * M_PI * torch::rand({count, 1});
  const auto radius = 1 + 0.05 * torch::randn({count, 1});
  return torch::cat({radius * torch::cos(angle), radius * torch::sin(angle)}, 1);
}

// The loss of a critic that should say "real" (1) or "drawn" (0), as a sum over the points.
torch::Tensor loss_of(const torch::Tensor& scores, double answer) {
  return torch::binary_cross_entropy_with_logits(scores, torch::full_like(scores, answer), {}, {},
                                                 torch::Reduction::Sum);
}

void train() {
  auto dist = lockstep::setup_distributed();
  torch::manual_seed(1);  // the same on all ranks: they draw the same batch, and share it out

  auto generator = dist.wrap_model<Layers>(kNoise, 2);
  auto critic = dist.wrap_model<Layers>(2, 1);
  auto generator_step =
      dist.make_optimizer(generator, lockstep::optim::AdamWOptions{.betas = {0.5, 0.999}});
  auto critic_step =
      dist.make_optimizer(critic, lockstep::optim::AdamWOptions{.betas = {0.5, 0.999}});

  for (int step = 1; step <= 1000; ++step) {
    const auto share = [&](const torch::Tensor& all) {  // every n-th point for n ranks
      return all.slice(0, dist.rank(), {}, dist.world_size()).to(dist.device());
    };
    const auto real = share(ring(kBatch)), noise = share(torch::randn({kBatch, kNoise}));
    const auto drawn = generator->forward(noise);

    critic_step->zero_grad();
    const auto critic_loss =
        loss_of(critic->forward(real), 1) + loss_of(critic->forward(drawn.detach()), 0);
    dist.backward(critic, critic_loss, 2 * real.size(0));
    critic_step->step(1e-3);

    // The gradient goes through the critic, whose own weights do not learn from this loss.
    generator_step->zero_grad();
    for (auto& parameter : critic->parameters()) parameter.requires_grad_(false);
    const auto generator_loss = loss_of(critic->forward(drawn), 1);
    dist.backward(generator, generator_loss, real.size(0));
    for (auto& parameter : critic->parameters()) parameter.requires_grad_(true);
    generator_step->step(1e-3);

    if (step % 100 != 0) continue;
    const torch::NoGradGuard no_grad;
    const auto distance = (drawn.norm(2, 1) - 1).abs().sum().item<double>();
    const auto sums =
        dist.sum({critic_loss.item<double>(), generator_loss.item<double>(), distance});
    if (dist.is_main())
      std::printf("step %d: critic %.5f, generator %.5f, distance from the ring %.5f\n", step,
                  sums[0] / (2 * kBatch), sums[1] / kBatch, sums[2] / kBatch);
  }
}

int main() {
  try {
    train();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_gan: %s\n", error.what());
    return 1;
  }
}
