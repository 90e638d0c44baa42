#include <csignal>
#include <filesystem>
#include <optional>

#include <torch/nn/modules/dropout.h>

#include <lockstep/train/distributed_trainer.h>
#include <tests/base/files.h>

#include "line.h"
#include "ranks.h"

namespace lockstep {

namespace {

// Draws its masks from LibTorch's generator; each rank has its own.
struct Dropping : NetImpl {
  Dropping() { register_module("dropout", dropout); }
  at::Tensor forward(const at::Tensor& input) { return NetImpl::forward(dropout->forward(input)); }
  torch::nn::Dropout dropout{0.5};
};

// Draws random numbers in get(), too, as an augmentation does.
class NoisyLine : public torch::data::datasets::Dataset<NoisyLine> {
 public:
  torch::data::Example<> get(std::size_t index) override {
    torch::data::Example<> example = line_.get(index);
    return {example.data + 0.1 * at::randn({2}), example.target};
  }
  Size size() const override { return line_.size(); }

 private:
  Line line_{29};
};

TrainerOptions options(const std::filesystem::path& output, int num_workers) {
  return {.epochs = 3,
          .batch_size = 4,  // the last step of an epoch has 5 samples, shared by both ranks
          .num_workers = num_workers,
          .learning_rate = 0.05,
          .output = output,
          .csv = false,
          .tensorboard = false,
          .progress_fd = -1};
}

// The weight after three epochs. Each run is interrupted in its third step, so runs end in the
// middle of an epoch and at its end.
template <typename Data>
at::Tensor interrupted(const DistributedManager& dist, ranks::Cells& cells, const Data& data,
                       const TrainerOptions& options) {
  std::int64_t step = 0;
  while (true) {
    DistributedTrainer trainer(
        dist, std::make_shared<Dropping>(),
        [&, calls = 0](const at::Tensor& output, const at::Tensor& target) mutable {
          if (++calls == 3 && dist.is_main()) std::raise(SIGINT);
          return kMean(output, target);
        },
        options);
    const TrainingResult result = trainer.fit(data);
    cells.expect(result.resumed_after == step, "it did not go on where it was");
    step = result.step;
    if (result.end == TrainingResult::End::finished)
      return trainer.model()->layer->weight.detach().clone();
    cells.expect(result.step % 3 == 0, fmt::format("interrupted at step {}", result.step));
    if (cells.num_failures() > 0) return {};
  }
}

template <typename Data>
void check_same(const DistributedManager& dist, ranks::Cells& cells, const Data& data,
                int num_workers) {
  std::optional<testing::TemporaryFolder> folder;
  if (dist.is_main()) folder.emplace();
  const std::filesystem::path path = dist.broadcast(folder ? folder->path().string() : "");
  DistributedTrainer whole(
      dist, [] { return Dropping(); }, kMean, options(path / "whole", num_workers));
  const TrainingResult result = whole.fit(data);
  cells.expect(result.step == 12, fmt::format("{} steps", result.step));
  const at::Tensor wanted = whole.model()->layer->weight.detach();
  cells.expect_same(interrupted(dist, cells, data, options(path / "parts", num_workers)), wanted,
                    "the weight");
  // The comparison can fail, because the masks matter.
  TrainerOptions other = options({}, num_workers);
  other.seed = 1;
  other.shuffle = false;
  DistributedTrainer others(dist, std::make_shared<Dropping>(), kMean, other);
  others.fit(data);
  cells.expect(!at::equal(others.model()->layer->weight, wanted), "the masks make no difference");
  dist.barrier();
}

}  // namespace

void check_resuming(const DistributedManager& dist, ranks::Cells& cells) {
  cells.cell("interrupted with dropout", [&] { check_same(dist, cells, Line(29), 1); });
  cells.cell("interrupted with a dataset that draws",
             [&] { check_same(dist, cells, NoisyLine(), 0); });
}

}  // namespace lockstep
