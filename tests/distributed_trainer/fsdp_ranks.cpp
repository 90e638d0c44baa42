#include <lockstep/train/distributed_trainer.h>

#include "line.h"
#include "ranks.h"

namespace lockstep {

namespace {

at::Tensor trained_in_shards(const DistributedManager& dist, const TrainerOptions& options) {
  FSDPTrainer trainer(dist, Net(), kMean, options);
  trainer.fit(Line(15));
  return trainer.dist()
      .full_state_dict(trainer.model(), {.rank0_only = false})
      .at(0)
      .tensor.detach()
      .clone();
}

}  // namespace

void check_fsdp(const DistributedManager& dist, ranks::Cells& cells) {
  // One rank has 7 samples and then 1; the other has 7 and then none, and computes with a stand-in.
  const TrainerOptions options = {.epochs = 3,
                                  .batch_size = 7,
                                  .optimizer = optim::SGDOptions{},
                                  .learning_rate = 0.1,
                                  .progress_fd = -1};
  cells.cell("a loss scale changes nothing where nothing overflows", [&] {
    TrainerOptions scaled = options;
    scaled.loss_scale = optim::LossScaleOptions{};
    cells.expect_same(trained_in_shards(dist, scaled), trained_in_shards(dist, options),
                      "the weight");
  });
}

}  // namespace lockstep
