// The table of layouts covers what it promises, even after someone shortens it.
#include "model_layouts.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace lockstep::parity {
namespace {

using ::testing::IsSupersetOf;

constexpr std::array kWorldSizes{1, 2, 4, 8, 16};

std::vector<ModelLayout> all_layouts(Share share) {
  std::vector<ModelLayout> all;
  for (const int num_ranks : kWorldSizes)
    for (const ModelLayout& layout : layouts_of(num_ranks, share)) {
      EXPECT_EQ(layout.num_ranks(), num_ranks) << layout.text();
      all.push_back(layout);
    }
  return all;
}

using Sizes = std::array<int, 5>;

std::set<Sizes> sizes_of_several_axes(const std::vector<ModelLayout>& layouts, int num_axes) {
  std::set<Sizes> sizes;
  for (const ModelLayout& one : layouts)
    if (one.num_axes() >= num_axes)
      sizes.insert({one.pp, one.replicate, one.shard, one.cp, one.tp});
  return sizes;
}

TEST(ModelLayouts, TwentyCombinationsAreOfThreeAxesOrMore) {
  EXPECT_GE(sizes_of_several_axes(all_layouts(Share::whole), 3).size(), 20U);
  EXPECT_GE(sizes_of_several_axes(all_layouts(Share::everyday), 3).size(), 10U);
  EXPECT_GE(sizes_of_several_axes(all_layouts(Share::whole), 4).size(), 5U);
}

TEST(ModelLayouts, ACombinationIsThereOnce) {
  std::set<std::string> texts;
  for (const ModelLayout& layout : all_layouts(Share::whole))
    EXPECT_TRUE(texts.insert(layout.text()).second) << layout.text();
}

TEST(ModelLayouts, EveryScheduleIsThereWithTwoAndFourRanks) {
  using enum pipeline::ScheduleKind;
  std::set<std::pair<int, pipeline::ScheduleKind>> alone;
  for (const ModelLayout& one : all_layouts(Share::everyday))
    if (one.pp > 1 && one.num_axes() == 1) alone.emplace(one.pp, one.schedule);
  for (const int pp : {2, 4})
    for (const auto schedule : {gpipe, one_forward_one_backward, interleaved, zb_h1, zb_v})
      EXPECT_TRUE(alone.contains({pp, schedule})) << pp << " " << pipeline::name_of(schedule);
}

TEST(ModelLayouts, EachAxisIsThereAlone) {
  std::set<int> tensor;
  std::set<std::pair<int, nn::ContextAlgorithm>> context;
  std::set<ShardingStrategy> strategies;
  for (const ModelLayout& one : all_layouts(Share::whole)) {
    if (one.num_axes() > 1 && one.strategy != ShardingStrategy::HYBRID_SHARD) continue;
    if (one.tp > 1) tensor.insert(one.tp);
    if (one.cp > 1) context.emplace(one.cp, one.algorithm);
    if (one.data_ranks() > 1) strategies.insert(one.strategy);
  }
  using enum nn::ContextAlgorithm;
  using enum ShardingStrategy;
  using Context = std::pair<int, nn::ContextAlgorithm>;
  EXPECT_THAT(tensor, IsSupersetOf({2, 4}));
  EXPECT_THAT(context, IsSupersetOf({Context{2, ring}, Context{4, ring}, Context{2, all_to_all},
                                     Context{4, all_to_all}}));
  EXPECT_THAT(strategies,
              IsSupersetOf({NO_SHARD, SHARD_OPTIMIZER, SHARD_GRAD_OP, FULL_SHARD, HYBRID_SHARD}));
}

// An axis that a strategy does not use would make two equal layouts look different.
TEST(ModelLayouts, StrategiesUseTheAxesThatAreThere) {
  for (const ModelLayout& one : all_layouts(Share::whole)) {
    const bool copies = one.strategy == ShardingStrategy::NO_SHARD;
    const bool hybrid = one.strategy == ShardingStrategy::HYBRID_SHARD;
    EXPECT_TRUE(copies ? one.shard == 1 : one.shard * one.cp > 1) << one.text();
    EXPECT_TRUE(copies || (hybrid ? one.replicate > 1 : one.replicate == 1)) << one.text();
    EXPECT_TRUE(one.pp > 1 || one.chunks == 1) << one.text();
  }
}

// tests/mutants names the cells that must find its faults.
TEST(ModelLayouts, HaveTheCellsThatFindMutants) {
  std::ifstream table(LOCKSTEP_SOURCE_DIR "/tests/mutants/mutants.json");
  for (const auto& mutant : nlohmann::json::parse(table)) {
    if (mutant.contains("test")) continue;  // another suite finds it
    const auto layouts = layouts_of(mutant.at("ranks"), Share::everyday);
    const std::string cells = mutant.at("cells");
    EXPECT_TRUE(std::ranges::any_of(layouts,
                                    [&](const ModelLayout& layout) {
                                      return cells.find(", " + layout.text() + ", ") !=
                                             std::string::npos;
                                    }))
        << mutant.at("name") << ": " << cells;
  }
}

}  // namespace
}  // namespace lockstep::parity
