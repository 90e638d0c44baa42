#include <gtest/gtest.h>

#include <lockstep/train/config/batch.h>
#include "tests/base/errors.h"
#include "tests/train/configs.h"

namespace lockstep::train {

namespace {

std::string batch_error(const BatchSection& asked, std::int64_t world_size) {
  return usage_error([&] { resolve_batch(asked, world_size); });
}

}  // namespace

TEST(Batch, fills_in_what_was_not_given) {
  const Batch whole{.micro = 4, .accumulation = 2, .global = 24};
  EXPECT_EQ(resolve_batch({.global = 24, .micro = 4, .accumulation = 2}, 3), whole);
  EXPECT_EQ(resolve_batch({.global = 24, .micro = 4}, 3), whole);
  EXPECT_EQ(resolve_batch({.global = 24, .accumulation = 2}, 3), whole);
  EXPECT_EQ(resolve_batch({.micro = 4, .accumulation = 2}, 3), whole);
}

TEST(Batch, has_one_accumulation_step_where_one_number_is_given) {
  EXPECT_EQ(resolve_batch({.global = 24}, 3), (Batch{.micro = 8, .accumulation = 1, .global = 24}));
  EXPECT_EQ(resolve_batch({.micro = 4}, 3), (Batch{.micro = 4, .accumulation = 1, .global = 12}));
}

TEST(Batch, says_all_numbers_and_near_ones_that_would_do) {
  EXPECT_EQ(batch_error({.global = 32, .micro = 4, .accumulation = 2}, 3),
            "train_batch_size 32 is not train_micro_batch_size_per_gpu 4 × "
            "gradient_accumulation_steps 2 × 3 ranks = 24: leave one of the three out to have it "
            "filled in, set train_batch_size to 24, or start 4 ranks");
  EXPECT_EQ(batch_error({.global = 32, .micro = 4}, 3),
            "train_batch_size 32 is no multiple of train_micro_batch_size_per_gpu 4 × 3 ranks = "
            "12, so gradient_accumulation_steps cannot be filled in: set train_batch_size to 24 or "
            "36, change train_micro_batch_size_per_gpu, or start another number of ranks");
  EXPECT_EQ(batch_error({.global = 32, .accumulation = 2}, 3),
            "train_batch_size 32 cannot be divided evenly among gradient_accumulation_steps 2 × 3 "
            "ranks = 6: set it to 30 or 36, or start another number of ranks");
  EXPECT_EQ(batch_error({.global = 2}, 3),
            "train_batch_size 2 cannot be divided evenly among 3 ranks: set it to 3, or start "
            "another number of ranks");
  EXPECT_EQ(batch_error({.accumulation = 2}, 1),
            "neither train_batch_size (samples of a step, on all ranks) nor "
            "train_micro_batch_size_per_gpu (samples of one forward pass, on one rank) is given: "
            "set at least one of them");
}

TEST(Batch, that_no_number_of_ranks_can_train_with_is_a_mistake_of_the_config) {
  EXPECT_EQ(mistake_with({{"/train_batch_size", 30}, {"/train_micro_batch_size_per_gpu", 4}}),
            "gpt.json:1: train_batch_size 30 is no multiple of train_micro_batch_size_per_gpu 4, "
            "so no number of ranks can train with it: make it 28 or 32, or change the other");
  EXPECT_EQ(mistake_with({{"/train_batch_size", 30},
                          {"/train_micro_batch_size_per_gpu", 4},
                          {"/gradient_accumulation_steps", 2}}),
            "gpt.json:1: train_batch_size 30 is no multiple of train_micro_batch_size_per_gpu 4 × "
            "gradient_accumulation_steps 2 = 8, so no number of ranks can train with it: make it "
            "24 or 32, or change the other");
  EXPECT_EQ(mistake_with({{"/train_batch_size", "auto"}}),
            "gpt.json:1: train_batch_size is missing: set it to the samples of a step on all "
            "ranks, or train_micro_batch_size_per_gpu to those of one forward pass on one rank, or "
            "both");
}

}  // namespace lockstep::train
