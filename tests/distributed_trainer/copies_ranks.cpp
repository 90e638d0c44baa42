#include <filesystem>
#include <optional>

#include <torch/nn/modules/dropout.h>

#include <lockstep/recovery/peer_copies.h>
#include <lockstep/train/distributed_trainer.h>
#include <tests/base/files.h>

#include "line.h"
#include "ranks.h"

namespace lockstep {

namespace {

// Draws its masks from LibTorch's generator; each rank has its own.
struct Forgetting : NetImpl {
  Forgetting() { register_module("dropout", dropout); }
  at::Tensor forward(const at::Tensor& input) { return NetImpl::forward(dropout->forward(input)); }
  torch::nn::Dropout dropout{0.5};
};

// Thrown to leave a trainer in the middle.
struct RankLost {};

// Twelve steps; every fourth has fewer samples.
TrainerOptions twelve_steps(std::int64_t memory_interval) {
  return {.epochs = 3,
          .batch_size = 4,
          .num_workers = 0,
          .learning_rate = 0.05,
          .memory_interval = memory_interval,
          .csv = false,
          .tensorboard = false,
          .progress_fd = -1};
}

struct Run {
  std::optional<TrainingResult> result;  // empty if the trainer was left
  at::Tensor weight;
};

// Trains in a job of its own. In its step `lost_in` (0: never) all ranks leave the trainer.
Run train(const DistributedConfig& config, const TrainerOptions& options, int lost_in) {
  DistributedTrainer trainer(
      setup_distributed(config), std::make_shared<Forgetting>(),
      [&, calls = 0](const at::Tensor& output, const at::Tensor& target) mutable {
        if (++calls == lost_in) throw RankLost();
        return kMean(output, target);
      },
      options);
  try {
    const TrainingResult result = trainer.fit(Line(29));
    const auto state = trainer.dist().full_state_dict(trainer.model(), {.rank0_only = false});
    return {result, state.at(0).tensor.detach().clone()};
  } catch (const RankLost&) {
    return {};
  }
}

enum class Lost { nobody, one, all };

// The run is left after `steps` steps and goes on from step `from`, to the bit as if it had not
// been left.
void check_going_on(const DistributedConfig& config, ranks::Cells& cells, TrainerOptions options,
                    int steps, Lost lost, std::int64_t from) {
  const Run whole = train(config, twelve_steps(0), 0);
  options.peer_copies = std::make_shared<PeerCopies>();
  cells.expect(!train(config, options, steps + 1).result, "it was not left");
  if (lost == Lost::all || (lost == Lost::one && cells.rank() == 1))
    options.peer_copies = std::make_shared<PeerCopies>();
  const Run rest = train(config, options, 0);
  cells.expect(rest.result->resumed_after == from,
               fmt::format("it went on from step {}", rest.result->resumed_after));
  cells.expect(rest.result->step == 12, fmt::format("{} steps", rest.result->step));
  cells.expect(rest.result->loss == whole.result->loss, "the last loss is another");
  cells.expect_same(rest.weight, whole.weight, "the weight");
  if (!options.output.empty())
    cells.expect(rest.result->checkpoint.filename() == "step-00000012",
                 "the last checkpoint is " + rest.result->checkpoint.string());
  cells.expect(!options.peer_copies->newest_step(RankMessages(setup_distributed(config).world())),
               "a run that is over has left copies");
}

}  // namespace

void check_copies_in_memory(const DistributedConfig& config, ranks::Cells& cells) {
  const auto check = [&](const char* name, const TrainerOptions& options, int steps, Lost lost,
                         std::int64_t from) {
    cells.cell(name, [&] { check_going_on(config, cells, options, steps, lost, from); });
  };
  check("left, copies of every step", twelve_steps(1), 5, Lost::nobody, 5);
  check("a rank lost, copies of every step", twelve_steps(1), 6, Lost::one, 6);
  check("a rank lost, copies of every third step", twelve_steps(3), 5, Lost::one, 3);
  check("all lost, and nothing on the disk", twelve_steps(1), 5, Lost::all, 0);

  std::optional<testing::TemporaryFolder> folder;
  if (cells.rank() == 0) folder.emplace();
  const std::filesystem::path path =
      RankMessages(cells.group()).broadcast(folder ? folder->path().string() : "");
  const auto with_disk = [&](const char* name, std::int64_t memory_interval) {
    TrainerOptions options = twelve_steps(memory_interval);
    options.output = path / name;
    options.checkpoint_interval = 4;
    options.asynchronous_checkpoints = false;
    return options;
  };
  check("copies newer than the checkpoint", with_disk("memory", 1), 5, Lost::one, 5);
  check("a checkpoint newer than the copies", with_disk("disk", 3), 5, Lost::one, 4);
  check("a checkpoint where all copies are lost", with_disk("lost", 1), 6, Lost::all, 4);
  cells.group()->barrier().wait_on_host();
}

}  // namespace lockstep
