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
  EXPECT_EQ(config.parallel.stages(), 12);
  EXPECT_EQ(config.parallel.schedule, PipelineSchedule::interleaved);
  EXPECT_EQ(config.parallel.context_algorithm, ContextExchange::all_to_all);
  EXPECT_TRUE(config.parallel.sequence_parallel);
  EXPECT_EQ(config.sharding.strategy, Sharding::full);
  const TrainConfig again = parse_config(to_json(config), {.name = "again.json"});
  EXPECT_EQ(to_json(again), to_json(config));
}

TEST(ParallelKeys, are_one_rank_along_each_where_they_are_left_out) {
  const TrainConfig config = config_with({});
  EXPECT_EQ(config.parallel.ranks_together(), 1);
  EXPECT_EQ(config.parallel.data, -1);
  EXPECT_EQ(to_json(parse_config(to_json(config), {.name = "again.json"})), to_json(config));
}

TEST(ParallelKeys, have_as_many_stages_a_rank_as_the_schedule) {
  const auto stages = [](const char* schedule) {
    return config_with({{"/parallel", {{"pipeline", 2}, {"schedule", schedule}}}})
        .parallel.stages();
  };
  EXPECT_EQ(stages("gpipe"), 2);
  EXPECT_EQ(stages("1f1b"), 2);
  EXPECT_EQ(stages("zb-h1"), 2);
  EXPECT_EQ(stages("interleaved"), 4);
  EXPECT_EQ(stages("zb-v"), 4);
}

TEST(ParallelKeys, that_contradict_each_other_are_refused) {
  const auto mistake = [](nlohmann::json parallel) {
    return mistake_with({{"/parallel", std::move(parallel)}});
  };
  EXPECT_THAT(mistake({{"data", 0}}), HasSubstr("parallel.data is 0"));
  EXPECT_THAT(mistake({{"schedule", "zb-v"}}), HasSubstr("there is no pipeline to run by it"));
  EXPECT_THAT(mistake({{"sequence_parallel", true}}), HasSubstr("there is no tensor axis"));
  EXPECT_THAT(mistake({{"pipeline", 2}, {"chunks", 3}}), HasSubstr("has one stage a rank"));
  EXPECT_THAT(mistake({{"pipeline", 2}, {"schedule", "zb-v"}, {"chunks", 3}}),
              HasSubstr("\"zb-v\" has two stages a rank"));
  EXPECT_THAT(mistake({{"pipeline", 2}, {"schedule", "1b1f"}}), HasSubstr("'1f1b'"));
  EXPECT_THAT(mistake({{"tensr", 2}}), HasSubstr("did you mean 'tensor'?"));
  EXPECT_THAT(mistake_with({{"/sharding_strategy", "NO_SHARD"},
                            {"/parallel", {{"sharding_strategy", "FULL_SHARD"}}}}),
              HasSubstr("outside of parallel it is \"NO_SHARD\": set one of them"));
}

}  // namespace lockstep::train
