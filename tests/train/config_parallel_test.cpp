#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/train/configs.h"

namespace lockstep::train {

using ::testing::HasSubstr;

TEST(ParallelKeys, say_how_many_ranks_lie_along_each_axis) {
  const TrainConfig config = config_with({{"/parallel",
                                           {{"data", -1},
                                            {"tensor", 2},
                                            {"pipeline", 3},
                                            {"context", 5},
                                            {"sequence_parallel", true},
                                            {"schedule", "interleaved"},
                                            {"chunks", 4},
                                            {"context_algorithm", "all_to_all"},
                                            {"sharding_strategy", "FULL_SHARD"}}}});
  EXPECT_EQ(config.parallel.ranks_together(), 30);
  EXPECT_EQ(config.parallel.schedule, pipeline::ScheduleKind::interleaved);
  EXPECT_EQ(config.parallel.context_algorithm, mesh::ContextAlgorithm::all_to_all);
  EXPECT_TRUE(config.parallel.sequence_parallel);
  EXPECT_EQ(config.sharding.strategy, ShardingStrategy::FULL_SHARD);
  const TrainConfig again = parse_config(to_json(config), {.name = "again.json"});
  EXPECT_EQ(to_json(again), to_json(config));
}

TEST(ParallelKeys, are_one_rank_along_each_where_they_are_left_out) {
  const TrainConfig config = config_with({});
  EXPECT_EQ(config.parallel.ranks_together(), 1);
  EXPECT_EQ(config.parallel.data, -1);
  EXPECT_EQ(to_json(parse_config(to_json(config), {.name = "again.json"})), to_json(config));
}

void take_a_registered_schedule() {
  const auto mine = pipeline::register_schedule(
      {.name = "mine", .order = [](const auto& size) { return pipeline::Order(size.num_ranks); }});
  const TrainConfig config = config_with({{"/parallel", {{"pipeline", 2}, {"schedule", "mine"}}}});
  EXPECT_EQ(config.parallel.schedule, mine);
  EXPECT_THAT(to_json(config), HasSubstr("\"schedule\": \"mine\""));
  EXPECT_THAT(mistake_with({{"/parallel", {{"pipeline", 2}, {"schedule", "mime"}}}}),
              HasSubstr("'mine'"));
  std::exit(::testing::Test::HasFailure() ? 1 : 0);
}

// Runs in a process of its own, because other tests compare the keys' description with
// docs/config.md.
TEST(ParallelKeysDeathTest, take_a_schedule_that_a_program_registered) {
  EXPECT_EXIT(take_a_registered_schedule(), ::testing::ExitedWithCode(0), "");
}

TEST(ParallelKeys, of_a_pipeline_are_written_as_they_were_read) {
  for (const nlohmann::json& keys :
       {nlohmann::json{{"schedule_file", "/schedules/mine.json"}, {"balance", "compute"}},
        nlohmann::json{{"schedule", "zb-h1"}, {"stage_layers", {3, 5}}, {"timeline_step", 7}}}) {
    nlohmann::json parallel = keys;
    parallel["pipeline"] = 2;
    const std::string text = to_json(config_with({{"/parallel", parallel}}));
    const auto written = nlohmann::json::parse(text).at("parallel");
    for (const auto& [key, value] : keys.items()) EXPECT_EQ(written.at(key), value) << key;
    EXPECT_EQ(to_json(parse_config(text, {.name = "again.json"})), text);
  }
}

TEST(ParallelKeys, that_contradict_each_other_are_refused) {
  const auto mistake = [](nlohmann::json parallel) {
    return mistake_with({{"/parallel", std::move(parallel)}});
  };
  EXPECT_THAT(mistake({{"data", 0}}), HasSubstr("parallel.data is 0"));
  for (const auto& [key, value] :
       std::map<std::string, nlohmann::json>{{"schedule", "zb-v"},
                                             {"chunks", 2},
                                             {"schedule_file", "mine.json"},
                                             {"balance", "time"},
                                             {"stage_layers", {4}},
                                             {"timeline_step", 3}})
    EXPECT_THAT(mistake({{key, value}}),
                HasSubstr("parallel." + key + " is set, and there is no pipeline"));
  EXPECT_THAT(mistake({{"pipeline", 2}, {"schedule_file", "mine.json"}, {"schedule", "zb-v"}}),
              HasSubstr("schedule_file is set, and so is schedule"));
  EXPECT_THAT(mistake({{"pipeline", 2}, {"balance", "time"}, {"stage_layers", {1, 2}}}),
              HasSubstr("stage_layers is set, and so is balance"));
  EXPECT_THAT(mistake({{"pipeline", 2}, {"stage_layers", {1, 0}}}),
              HasSubstr("stage_layers is [1,0]: it must be a list of 1 to"));
  EXPECT_THAT(mistake({{"pipeline", 2}, {"stage_layers", 3}}), HasSubstr("it must be a list"));
  EXPECT_THAT(mistake({{"pipeline", 2}, {"balance", "even"}}), HasSubstr("balance is \"even\""));
  EXPECT_THAT(mistake({{"sequence_parallel", true}}), HasSubstr("there is no tensor axis"));
  EXPECT_THAT(mistake({{"pipeline", 2}, {"chunks", 3}}), HasSubstr("has 1 stage a rank"));
  EXPECT_THAT(mistake({{"pipeline", 2}, {"schedule", "zb-v"}, {"chunks", 3}}),
              HasSubstr("\"zb-v\" has 2 stages a rank: take \"interleaved\""));
  EXPECT_THAT(mistake({{"pipeline", 2}, {"schedule", "1b1f"}}), HasSubstr("'1f1b'"));
  EXPECT_THAT(mistake({{"tensr", 2}}), HasSubstr("did you mean 'tensor'?"));
  EXPECT_THAT(mistake_with({{"/sharding_strategy", "NO_SHARD"},
                            {"/parallel", {{"sharding_strategy", "FULL_SHARD"}}}}),
              HasSubstr("outside of parallel it is \"NO_SHARD\": set one of them"));
}

}  // namespace lockstep::train
