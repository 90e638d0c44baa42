// Copies of a model in one layout are restored in others and by fewer ranks. The result is, to the
// bit, that of a checkpoint.
#include <filesystem>
#include <memory>

#include "../parity/spread_model.h"
#include "../reshard/same_contents.h"
#include "tables.h"

namespace lockstep::peer_copies {

namespace {

namespace fs = std::filesystem;
using parity::ModelLayout;
using parity::SpreadModel;
using ranks::Cells;

constexpr std::int64_t kSteps = 2;

std::unique_ptr<SpreadModel> make(const std::shared_ptr<comm::Communicator>& world,
                                  const ModelLayout& layout) {
  const models::ModelConfig config{.family = "gpt2",
                                   .vocab_size = 37,
                                   .hidden_size = 32,
                                   .num_layers = 2,
                                   .num_heads = 4,
                                   .max_positions = parity::kModelLength};
  return std::make_unique<SpreadModel>(config, parity::Numbers{}, layout,
                                       parity::StepWay{"one pass"}, world, optim::AdamWOptions{});
}

fs::path save(Cells& cells, const RankMessages& world, SpreadModel& model, const fs::path& folder) {
  Checkpointer checkpoints(world, folder);
  const SaveResult saved =
      checkpoints.save_and_wait({.tensors = model.state(), .state = {.step = kSteps}});
  cells.expect(saved.ok(), saved.error);
  return saved.path;
}

struct Goal {
  std::vector<int> members;
  ModelLayout layout;
};

}  // namespace

void check_layouts(Cells& cells, const std::string& folder) {
  using enum ShardingStrategy;
  const std::vector<ModelLayout> from = {{.replicate = 4},
                                         {.shard = 4, .strategy = FULL_SHARD},
                                         {.shard = 2, .tp = 2, .strategy = SHARD_GRAD_OP},
                                         {.pp = 2, .tp = 2}};
  const std::vector<Goal> goals = {{{0, 1, 2, 3}, {.shard = 4, .strategy = FULL_SHARD}},
                                   {{0, 1, 2, 3}, {.shard = 2, .tp = 2, .strategy = SHARD_GRAD_OP}},
                                   {{0, 1, 3}, {.replicate = 3}},
                                   {{0, 1, 3}, {.shard = 3, .strategy = FULL_SHARD}},
                                   {{3, 1}, {.tp = 2}},
                                   {{1, 3}, {.shard = 2, .strategy = SHARD_OPTIMIZER}}};
  for (std::size_t i = 0; i < from.size(); ++i) {
    PeerCopies copies;
    fs::path wanted;
    const fs::path saved = fs::path(folder) / std::to_string(i);
    cells.cell("copied, " + from[i].text(), [&] {
      const auto model = make(cells.group(), from[i]);
      for (std::int64_t step = 0; step < kSteps; ++step) {
        model->pass(step);
        model->step(0.01);
      }
      const RankMessages world(cells.group());
      wanted = save(cells, world, *model, saved);
      copies.take(world, {.tensors = model->state(), .state = {.step = kSteps}});
      copies.finish();
    });
    // Rank 2 is lost, for good or with a new process in its place.
    if (cells.rank() == 2) copies.forget();
    for (const Goal& goal : goals)
      cells.cell(fmt::format("{} restored, {}", from[i].text(), goal.layout.text()), [&] {
        const auto group = world_of(cells, goal.members);
        if (group == nullptr) return;
        const RankMessages world(group);
        const auto model = make(group, goal.layout);
        auto state = model->state();
        const auto restored = copies.restore(world, state, {.complete = {"model/", "optimizer/"}});
        if (!restored) return cells.expect(false, "nothing was restored");
        cells.expect(restored->step == kSteps, "another step");
        model->state_was_read(state);
        const fs::path again = save(cells, world, *model, fs::path(folder) / "again");
        if (group->rank() == 0) reshard::expect_same_contents(cells, again, wanted);
        group->barrier().wait_on_host();
      });
  }
}

}  // namespace lockstep::peer_copies
