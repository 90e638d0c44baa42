// The stages of a run, and the advice if there are more stages than layers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/train/preflight/pipeline_plan.h>

#include "tests/base/errors.h"
#include "tests/train/configs.h"

namespace lockstep::train {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

RunPipeline planned(const json& parallel, std::int64_t num_layers) {
  const TrainConfig config = config_with({{"/parallel", parallel}});
  return resolve_pipeline(config,
                          {.family = "gpt2",
                           .vocab_size = 256,
                           .hidden_size = 64,
                           .num_layers = num_layers,
                           .num_heads = 4},
                          /*num_micro_batches=*/4);
}

// A user who follows the advice gets a run that works.
TEST(RunPipeline, OfMoreStagesThanLayersSaysWhatCanBeTakenInstead) {
  struct Case {
    json parallel;
    std::int64_t num_layers;
    const char* advice;
    json followed;
  };
  const std::vector<Case> all = {
      {{{"pipeline", 4}}, 3, "take a pipeline of at most 3, or more layers", {{"pipeline", 3}}},
      {{{"pipeline", 2}, {"schedule", "interleaved"}, {"chunks", 3}},
       4,
       "take parallel.chunks of at most 2, or more layers",
       {{"pipeline", 2}, {"schedule", "interleaved"}, {"chunks", 2}}},
      {{{"pipeline", 2}, {"schedule", "interleaved"}, {"chunks", 4}},
       2,
       "take parallel.chunks of 1, or more layers",
       {{"pipeline", 2}, {"schedule", "interleaved"}, {"chunks", 1}}},
      {{{"pipeline", 2}, {"schedule", "interleaved"}},
       3,
       "take parallel.chunks of 1, or more layers",
       {{"pipeline", 2}, {"schedule", "interleaved"}, {"chunks", 1}}},
      {{{"pipeline", 8}, {"schedule", "interleaved"}, {"chunks", 2}},
       6,
       "take a pipeline of at most 3, or more layers",
       {{"pipeline", 3}, {"schedule", "interleaved"}, {"chunks", 2}}},
      {{{"pipeline", 4}, {"schedule", "interleaved"}, {"chunks", 2}},
       3,
       "take a pipeline of at most 3 and parallel.chunks of 1, or more layers",
       {{"pipeline", 3}, {"schedule", "interleaved"}, {"chunks", 1}}},
      {{{"pipeline", 2}, {"schedule", "zb-v"}},
       3,
       "take a schedule with one stage a rank, such as zb-h1, or more layers",
       {{"pipeline", 2}, {"schedule", "zb-h1"}}},
      {{{"pipeline", 8}, {"schedule", "zb-v"}},
       5,
       "take a pipeline of at most 2, or more layers",
       {{"pipeline", 2}, {"schedule", "zb-v"}}},
      {{{"pipeline", 4}, {"schedule", "zb-v"}},
       3,
       "take a pipeline of at most 3 and a schedule with one stage a rank, such as zb-h1",
       {{"pipeline", 3}, {"schedule", "zb-h1"}}},
  };
  for (const Case& one : all) {
    SCOPED_TRACE(one.parallel.dump());
    EXPECT_THAT(usage_error([&] { planned(one.parallel, one.num_layers); }), HasSubstr(one.advice));
    EXPECT_NO_THROW(planned(one.followed, one.num_layers)) << one.followed;
  }
}

TEST(RunPipeline, OfOneLayerIsNone) {
  EXPECT_THAT(usage_error([] {
                planned({{"pipeline", 2}, {"schedule", "gpipe"}}, 1);
              }),
              HasSubstr("the model has 1 layer, of which each stage needs one: take no pipeline, "
                        "without all that parallel says of it, or more layers"));
  EXPECT_NO_THROW(config_with({{"/parallel", json::object()}}));
}

}  // namespace
}  // namespace lockstep::train
