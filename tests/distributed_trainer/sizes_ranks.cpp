#include <cmath>
#include <fstream>

#include <lockstep/train/distributed_trainer.h>

#include "line.h"
#include "ranks.h"

namespace lockstep {

void train_to(const DistributedManager& dist, const std::filesystem::path& output,
              std::int64_t max_steps) {
  std::filesystem::create_directories(output);
  std::ofstream samples(output / fmt::format("samples-{}-of-{}", dist.rank(), dist.world_size()),
                        std::ios::app);
  DistributedTrainer trainer(
      dist, Net(),
      [&](const at::Tensor& prediction, const at::Tensor& target) {
        // Computes a sample's number back from its target in Line.
        for (std::int64_t row = 0; row < target.size(0); ++row)
          samples << std::lround((target[row].item<double>() + 2) / 3 * 10) << "\n";
        return kMean(prediction, target);
      },
      TrainerOptions{.max_steps = max_steps,
                     .batch_size = 3,
                     .accumulation = 2,
                     .optimizer = optim::SGDOptions{},
                     .learning_rate = 0.001,
                     // The rate depends on the batch, which stays the same: it is four times as
                     // large on any number of ranks.
                     .learning_rate_scaling = train::LearningRateScaling::linear,
                     .output = output,
                     .tensorboard = false,
                     .progress_fd = -1});
  trainer.fit(Line(100));
}

}  // namespace lockstep
