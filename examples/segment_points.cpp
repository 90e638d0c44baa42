// Labels the points of clouds, which have different numbers of points: each rank's batches are
// uneven, and the gradient is that of the mean over the points of all ranks.
//
//   lockstep run --nproc-per-node 2 ./segment_points
//
// The model is sharded over the ranks (FSDP). Any number of ranks prints the same losses.
#include <cstdio>
#include <exception>
#include <vector>

#include <torch/torch.h>

#include <lockstep/lockstep.h>

constexpr std::int64_t kClouds = 24;  // clouds of a step, of all ranks together

// Clouds, one after the other, as graph libraries store them.
struct Clouds {
  torch::Tensor points;  // [points, 2]
  torch::Tensor cloud;   // [points], the cloud that a point is in
  torch::Tensor labels;  // [points], whether it lies in the half of its cloud that is further right
  std::int64_t count = 0;
};

// Each cloud is a function of its number alone, so every rank can make those that it needs.
Clouds make_clouds(std::int64_t first, std::int64_t end, std::int64_t stride) {
  std::vector<torch::Tensor> points, cloud, labels;
  Clouds clouds;
  for (std::int64_t number = first; number < end; number += stride, ++clouds.count) {
    torch::manual_seed(static_cast<std::uint64_t>(number));
    const auto size = torch::randint(5, 60, {1}).item<std::int64_t>();
    const auto one = torch::randn({size, 2}) + 2 * torch::randn({1, 2});
    points.push_back(one);
    cloud.push_back(torch::full({size}, clouds.count, torch::kLong));
    labels.push_back(one.select(1, 0).gt(one.select(1, 0).mean()).to(torch::kLong));
  }
  clouds.points = torch::cat(points);
  clouds.cloud = torch::cat(cloud);
  clouds.labels = torch::cat(labels);
  return clouds;
}

struct Segmenter : torch::nn::Module {
  Segmenter() {
    register_module("of_point", of_point);
    register_module("blocks", blocks);
    register_module("labels", labels);
  }

  // [points, 2], and the cloud of each point → [points, 2 labels]
  torch::Tensor forward(const torch::Tensor& points, const torch::Tensor& cloud,
                        std::int64_t num_clouds) {
    auto x = of_point->forward(points);
    const auto sizes = torch::bincount(cloud, {}, num_clouds).unsqueeze(1);
    for (const auto& block : *blocks) {
      // A point sees the mean of its cloud.
      const auto sums = torch::zeros({num_clouds, x.size(1)}, x.options()).index_add(0, cloud, x);
      const auto both = torch::cat({x, (sums / sizes).index_select(0, cloud)}, 1);
      x = x + torch::tanh(block->as<torch::nn::Linear>()->forward(both));
    }
    return labels->forward(x);
  }

  torch::nn::Linear of_point{2, 32}, labels{32, 2};
  torch::nn::ModuleList blocks{torch::nn::Linear(64, 32), torch::nn::Linear(64, 32)};
};

void train() {
  auto dist = lockstep::setup_distributed({.mode = lockstep::ParallelMode::FSDP});
  torch::manual_seed(1);
  auto model = dist.wrap_model<Segmenter>();
  auto adamw = dist.make_optimizer(model, lockstep::optim::AdamWOptions{});

  for (std::int64_t step = 1; step <= 200; ++step) {
    const std::int64_t first = step * kClouds;
    const auto clouds = make_clouds(first + dist.rank(), first + kClouds, dist.world_size());
    const auto labels = clouds.labels.to(dist.device());

    adamw->zero_grad();
    const auto scores = model->forward(clouds.points.to(dist.device()),
                                       clouds.cloud.to(dist.device()), clouds.count);
    const auto loss = torch::cross_entropy_loss(scores, labels, {}, torch::Reduction::Sum);
    // The loss is a sum over so many points of this rank; gradients are divided by those of all.
    dist.backward(model, loss, labels.size(0));
    adamw->step(5e-3);

    if (step % 20 != 0) continue;
    const double right = dist.sum(scores.argmax(1).eq(labels).sum().item<double>());
    const auto& totals = dist.totals(model);
    if (dist.is_main())
      std::printf("step %ld: loss %.6f, right %.1f%% of %.0f points\n", static_cast<long>(step),
                  totals.mean_loss(), 100 * right / totals.count(), totals.count());
  }
}

int main() {
  try {
    train();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "segment_points: %s\n", error.what());
    return 1;
  }
}
