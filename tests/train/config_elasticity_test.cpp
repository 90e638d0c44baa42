#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/train/config/batch.h>
#include "tests/train/configs.h"

namespace lockstep::train {

namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

nlohmann::json elasticity(const nlohmann::json& changes = {}) {
  nlohmann::json section = {
      {"enabled", true}, {"max_train_batch_size", 2000}, {"micro_batch_sizes", {2, 4, 6}}};
  if (!changes.is_null()) section.update(changes);
  return section;
}

TrainConfig elastic_config(const nlohmann::json& section) {
  return config_with({{"/train_batch_size", nullptr}, {"/elasticity", section}});
}

std::string elastic_mistake(const nlohmann::json& section) {
  return mistake_with({{"/train_batch_size", nullptr}, {"/elasticity", section}});
}

}  // namespace

// These are DeepSpeed's results for the same settings.
TEST(Elasticity, chooses_the_batch_that_most_numbers_of_ranks_divide) {
  const ElasticitySection section{
      .max_global = 10'000, .micro_batches = {8, 12, 16, 17}, .min_ranks = 32, .max_ranks = 1500};
  const ElasticChoice choice = choose_batch(section, 1);
  EXPECT_EQ(choice.global, 9792);
  EXPECT_THAT(choice.even_data_ranks, SizeIs(23));
  for (const std::int64_t ranks : choice.even_data_ranks) {
    const Batch batch = elastic_batch(section, ranks, 1);
    EXPECT_EQ(batch.micro * batch.accumulation * ranks, 9792) << ranks;
    EXPECT_THAT(section.micro_batches, ::testing::Contains(batch.micro));
  }
  EXPECT_EQ(choose_batch({.max_global = 2000, .micro_batches = {2, 4, 6}}, 1).global, 1680);
  EXPECT_THAT(
      choose_batch({.max_global = 8, .micro_batches = {2, 4}, .max_ranks = 3}, 1).even_data_ranks,
      ElementsAre(1, 2));
}

TEST(Elasticity, takes_the_largest_micro_batch_that_divides_a_share) {
  const ElasticitySection section{.max_global = 2000, .micro_batches = {2, 4, 6}};
  EXPECT_EQ(elastic_batch(section, 4, 1), (Batch{.micro = 6, .accumulation = 70, .global = 1680}));
  EXPECT_EQ(elastic_batch(section, 420, 1), (Batch{.micro = 4, .accumulation = 1, .global = 1680}));
}

TEST(Elasticity, trains_with_the_same_batch_on_ranks_that_do_not_divide_it) {
  const ElasticitySection section{.max_global = 2000, .micro_batches = {2, 4, 6}};
  const Batch batch = elastic_batch(section, 11, 1);
  EXPECT_EQ(batch.global, 1680);
  EXPECT_LE(batch.micro, 6);
  EXPECT_GE(batch.micro * batch.accumulation * 11, 1680);
}

TEST(Elasticity, has_limits_for_all_ranks_of_which_some_work_together) {
  const ElasticitySection section{
      .max_global = 64, .micro_batches = {2, 4}, .min_ranks = 8, .max_ranks = 16};
  EXPECT_EQ(elastic_batch(section, 2, 4).global, elastic_batch(section, 4, 4).global);
  EXPECT_EQ(usage_error([&] { elastic_batch(section, 1, 4); }),
            "elasticity is for 8 to 16 ranks (min_gpus, max_gpus), and there are 1 times 4: start "
            "other ranks, or change them");
  EXPECT_THAT(usage_error([&] { elastic_batch(section, 5, 4); }), HasSubstr("there are 5 times 4"));
}

TEST(Elasticity, of_a_config_says_what_a_batch_is) {
  const TrainConfig config =
      elastic_config(elasticity({{"min_gpus", 2}, {"max_gpus", 8}, {"version", 0.2}}));
  ASSERT_TRUE(config.elasticity);
  EXPECT_EQ(resolve_batch(config, 4).global, choose_batch(*config.elasticity, 1).global);
  EXPECT_THAT(usage_error([&] { resolve_batch(config, 9); }), HasSubstr("for 2 to 8 ranks"));
  const TrainConfig again = parse_config(to_json(config), {.name = "again.json"});
  EXPECT_EQ(again.elasticity, config.elasticity);
}

TEST(Elasticity, that_is_off_may_have_any_settings) {
  EXPECT_FALSE(config_with({{"/elasticity", {{"enabled", false}, {"max_gpus", -5}}}}).elasticity);
  EXPECT_FALSE(config_with({{"/elasticity", nlohmann::json::object()}}).elasticity);
  EXPECT_THAT(mistake_with({{"/elasticity", {{"enabled", false}, {"max_gpu", 5}}}}),
              HasSubstr("elasticity.max_gpu"));
}

TEST(Elasticity, mistakes) {
  EXPECT_THAT(
      mistake_with({{"/elasticity", elasticity()}}),
      HasSubstr("which chooses the samples of a step, and the config has train_batch_size"));
  EXPECT_TRUE(config_with({{"/elasticity", elasticity({{"ignore_non_elastic_batch_info", true}})}})
                  .elasticity);
  EXPECT_THAT(elastic_mistake({{"enabled", true}, {"micro_batch_sizes", {2}}}),
              HasSubstr("elasticity.max_train_batch_size is missing"));
  EXPECT_THAT(elastic_mistake({{"enabled", true}, {"max_train_batch_size", 8}}),
              HasSubstr("elasticity.micro_batch_sizes is missing"));
  EXPECT_THAT(elastic_mistake(elasticity({{"max_train_batch_size", 4}})),
              HasSubstr("has 6, and max_train_batch_size is 4"));
  EXPECT_THAT(elastic_mistake(elasticity({{"min_gpus", 9}, {"max_gpus", 8}})),
              HasSubstr("is 9, and max_gpus 8"));
  EXPECT_THAT(elastic_mistake(elasticity({{"min_gpus", 5000}})),
              HasSubstr("no number of ranks from 5000 to 10000"));
  EXPECT_THAT(elastic_mistake(elasticity({{"model_parallel_size", 2}})),
              HasSubstr("is 2, and parallel has 1 ranks"));
  EXPECT_THAT(elastic_mistake(elasticity({{"version", 0.3}})), HasSubstr("elasticity.version"));
}

}  // namespace lockstep::train
