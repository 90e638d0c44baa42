// A checkpoint of any layout can be loaded in any other: weights and optimizer state are equal to
// the bit, and the next steps have the same losses. Jobs of each size save first; then jobs of each
// size load what all of them have saved.
#include <cstring>
#include <fstream>

#include <gtest/gtest.h>

#include <lockstep/checkpoint/format/folder.h>
#include <lockstep/recovery/checkpointer.h>

#include <tests/base/files.h>
#include <tests/ranks/cells.h>
#include <tests/ranks/job.h>

#include "../parity/spread_model.h"
#include "layouts.h"
#include "same_contents.h"

namespace lockstep::reshard {

namespace {

namespace fs = std::filesystem;
using parity::ModelLayout;
using parity::SpreadModel;
using ranks::Cells;

constexpr double kRate = 0.01;
constexpr std::int64_t kStepsBefore = 2;
constexpr std::int64_t kStepsAfter = 2;

const parity::StepWay kOnePass{"one pass"};

models::ModelConfig model_of(const std::string& family) {
  // One model has tied weights and products that are cut in three; the other has fewer key-value
  // heads than tensor ranks.
  models::ModelConfig config{.family = "gpt2",
                             .vocab_size = 37,
                             .hidden_size = 32,
                             .num_layers = 4,
                             .num_heads = 4,
                             .max_positions = parity::kModelLength,
                             .dropout = 0.1};
  if (family == "gpt") return config;
  config.family = "llama";
  config.num_kv_heads = 2;
  config.intermediate_size = 48;
  config.tie_embeddings = false;
  return config;
}

std::unique_ptr<SpreadModel> make(const Cells& cells, const std::string& family,
                                  const ModelLayout& layout) {
  return std::make_unique<SpreadModel>(model_of(family), parity::Numbers{}, layout, kOnePass,
                                       cells.group(), optim::AdamWOptions{});
}

double step(SpreadModel& model, std::int64_t number) {
  const double loss = model.pass(number);
  model.clip(0.25);
  model.step(kRate);
  return loss;
}

std::vector<double> later_losses(SpreadModel& model) {
  std::vector<double> losses;
  for (std::int64_t i = 0; i < kStepsAfter; ++i) losses.push_back(step(model, kStepsBefore + i));
  return losses;
}

fs::path save(Cells& cells, SpreadModel& model, const fs::path& folder) {
  Checkpointer checkpoints(RankMessages(cells.group()), folder);
  checkpoints.save({.tensors = model.state(), .state = {.step = kStepsBefore}});
  const SaveResult saved = checkpoints.finish();
  cells.expect(saved.ok(), saved.error);
  return saved.path;
}

void save_all(Cells& cells, const std::string& family, const fs::path& root) {
  const auto layouts = layouts_of(cells.num_ranks());
  for (std::size_t i = 0; i < layouts.size(); ++i)
    cells.cell(fmt::format("{} saved, {}", family, layouts[i].text()), [&] {
      const fs::path folder = root / folder_name(cells.num_ranks(), i);
      const auto model = make(cells, family, layouts[i]);
      for (std::int64_t done = 0; done < kStepsBefore; ++done) step(*model, done);
      save(cells, *model, folder);
      const auto losses = later_losses(*model);
      if (cells.rank() != 0) return;
      std::ofstream file(folder / "losses", std::ios::binary);
      file.write(reinterpret_cast<const char*>(losses.data()),
                 static_cast<std::streamsize>(losses.size() * sizeof(double)));
    });
}

void load_all(Cells& cells, const std::string& family, const fs::path& root) {
  for (const ModelLayout& layout : layouts_of(cells.num_ranks()))
    for (const int saved_by : kWorldSizes)
      for (std::size_t i = 0; i < layouts_of(saved_by).size(); ++i)
        cells.cell(fmt::format("{} of {} ranks ({}) loaded, {}", family, saved_by,
                               layouts_of(saved_by)[i].text(), layout.text()),
                   [&] {
                     const fs::path from = root / folder_name(saved_by, i);
                     const auto model = make(cells, family, layout);
                     auto state = model->state();
                     const auto newest = checkpoint::newest_checkpoint(from);
                     const RankMessages ranks(cells.group());
                     const auto training = load_checkpoint(ranks, newest->path, state,
                                                           {.complete = {"model/", "optimizer/"}});
                     cells.expect(training.step == kStepsBefore, "another step");
                     model->state_was_read(state);
                     const fs::path again = save(cells, *model, root / "again");
                     if (cells.rank() == 0) expect_same_contents(cells, again, newest->path);
                     const auto losses = later_losses(*model);
                     const std::string bytes = testing::read_file(from / "losses");
                     for (std::size_t k = 0; k < losses.size(); ++k) {
                       double wanted = 0;
                       std::memcpy(&wanted, bytes.data() + k * sizeof wanted, sizeof wanted);
                       cells.expect(std::abs(losses[k] - wanted) <= 1e-9 * std::abs(wanted),
                                    fmt::format("loss {} is {} and not {}", k, losses[k], wanted));
                     }
                   });
}

class Reshard : public ::testing::TestWithParam<const char*> {};

TEST_P(Reshard, EveryLayoutIntoEveryOther) {
  const testing::TemporaryFolder folder;
  for (const char* what : {"--save", "--load"})
    for (const int num_ranks : kWorldSizes)
      ranks::expect_cells_pass(num_ranks, {what, GetParam(), folder.path().string()},
                               milliseconds(900'000));
}

INSTANTIATE_TEST_SUITE_P(Of, Reshard, ::testing::Values("gpt"),
                         [](const auto& info) { return std::string(info.param); });
INSTANTIATE_TEST_SUITE_P(Whole, Reshard, ::testing::Values("llama"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace lockstep::reshard

// With a task, a model family and a folder as arguments, it is one rank of a job.
int main(int argc, char** argv) {
  using namespace lockstep;
  if (argc >= 4 && (std::string(argv[1]) == "--save" || std::string(argv[1]) == "--load")) {
    const auto table = std::string(argv[1]) == "--save" ? reshard::save_all : reshard::load_all;
    return ranks::run_cells([&](ranks::Cells& cells) { table(cells, argv[2], argv[3]); },
                            argc > 4 ? argv[4] : "");
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
