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

TEST(Batch, says_all_numbers_where_they_contradict_each_other) {
  EXPECT_EQ(batch_error({.global = 32, .micro = 4, .accumulation = 2}, 3),
            "train_batch_size 32 is not train_micro_batch_size_per_gpu 4 × "
            "gradient_accumulation_steps 2 × 3 ranks = 24: leave one of the three out to have it "
            "filled in, set train_batch_size to 24, or start 4 ranks");
  // There are 6 ranks, and every two have the same samples.
  EXPECT_EQ(
      usage_error([] { resolve_batch({.global = 32, .micro = 4, .accumulation = 2}, 3, {}, 2); }),
      "train_batch_size 32 is not train_micro_batch_size_per_gpu 4 × "
      "gradient_accumulation_steps 2 × 3 shares of the data (of 2 ranks each) = 24: leave "
      "one of the three out to have it filled in, set train_batch_size to 24, or start 8 "
      "ranks");
  EXPECT_EQ(batch_error({.accumulation = 2}, 1),
            "neither train_batch_size (samples of a step, on all ranks) nor "
            "train_micro_batch_size_per_gpu (samples of one forward pass, on one rank) is given: "
            "set at least one of them");
}

TEST(Batch, is_kept_on_numbers_of_ranks_that_do_not_divide_it) {
  // Two ranks get 11 samples and one gets 10, in 3 passes: 12, 12 and 8 over all ranks.
  EXPECT_EQ(resolve_batch({.global = 32, .micro = 4}, 3),
            (Batch{.micro = 4, .accumulation = 3, .global = 32}));
  // No pass is larger than it must be.
  EXPECT_EQ(resolve_batch({.global = 9, .micro = 4}, 1),
            (Batch{.micro = 3, .accumulation = 3, .global = 9}));
  EXPECT_EQ(resolve_batch({.global = 32}, 3),
            (Batch{.micro = 11, .accumulation = 1, .global = 32}));
  EXPECT_EQ(resolve_batch({.global = 32, .accumulation = 2}, 3),
            (Batch{.micro = 6, .accumulation = 2, .global = 32}));
  EXPECT_EQ(resolve_batch({.global = 2}, 3), (Batch{.micro = 1, .accumulation = 1, .global = 2}));
  for (std::int64_t global = 1; global < 60; ++global)
    for (std::int64_t ranks = 1; ranks < 12; ++ranks)
      for (std::int64_t micro = 1; micro < 12; ++micro) {
        const Batch batch = resolve_batch({.global = global, .micro = micro}, ranks);
        SCOPED_TRACE(fmt::format("{} on {} ranks, {} at once", global, ranks, micro));
        EXPECT_EQ(batch.global, global);
        EXPECT_LE(batch.micro, micro);
        EXPECT_GE(batch.micro * batch.accumulation * ranks, global);
        EXPECT_LT(batch.micro * (batch.accumulation - 1) * ranks, global) << "a pass too many";
      }
}

TEST(Batch, of_a_run_that_has_begun_is_kept_by_another_accumulation) {
  // The run began with 4 samples × 2 passes × 4 ranks.
  const BegunBatch begun{.global = 32, .micro = 4, .num_ranks = 4};
  const BatchSection asked{.micro = 4, .accumulation = 2};
  EXPECT_EQ(resolve_batch(asked, 4, begun), resolve_batch(asked, 4));
  EXPECT_EQ(resolve_batch(asked, 2, begun), (Batch{.micro = 4, .accumulation = 4, .global = 32}));
  EXPECT_EQ(resolve_batch(asked, 3, begun), (Batch{.micro = 4, .accumulation = 3, .global = 32}));
  EXPECT_EQ(resolve_batch(asked, 5, begun), (Batch{.micro = 4, .accumulation = 2, .global = 32}));
  // This holds even if accumulation was asked for.
  EXPECT_EQ(resolve_batch({.global = 32, .micro = 4, .accumulation = 2}, 3, begun).accumulation, 3);
  EXPECT_EQ(resolve_batch({.global = 32, .accumulation = 2}, 2, begun).accumulation, 4);
  // One pass had 8 samples on each of 4 ranks; a rank has no room for more when there are fewer.
  const BegunBatch whole{.global = 32, .micro = 8, .num_ranks = 4};
  EXPECT_EQ(resolve_batch({.global = 32}, 3, whole),
            (Batch{.micro = 6, .accumulation = 2, .global = 32}));
  EXPECT_EQ(resolve_batch({.global = 32}, 5, whole),
            (Batch{.micro = 7, .accumulation = 1, .global = 32}));
}

TEST(Batch, that_is_uneven_or_kept_is_announced) {
  const auto note = [](const BatchSection& asked, std::int64_t ranks,
                       const std::optional<BegunBatch>& begun = {}) {
    return batch_note(resolve_batch(asked, ranks, begun), ranks, begun);
  };
  EXPECT_EQ(note({.global = 32, .micro = 4}, 4), "");
  EXPECT_EQ(note({.global = 32, .micro = 4}, 3),
            "a step has 32 samples: 10 or 11 of each of 3 ranks, in 3 passes of at most 4");
  EXPECT_EQ(
      batch_note(resolve_batch({.global = 7}, 1), 1, BegunBatch{.global = 7, .num_ranks = 2}, 4),
      "a step has the 7 samples that it had on 2 shares of the data: 7 of each of 1 share of "
      "the data, in 1 pass of at most 7");
  EXPECT_EQ(note({.global = 2}, 3),
            "a step has 2 samples: 1 or none of each of 3 ranks, in 1 pass of at most 1");
  const BegunBatch begun{.global = 32, .micro = 4, .num_ranks = 4};
  EXPECT_EQ(note({.micro = 4, .accumulation = 2}, 4, begun), "");
  EXPECT_EQ(note({.micro = 4, .accumulation = 2}, 2, begun),
            "a step has the 32 samples that it had on 4 ranks: 16 of each of 2 ranks, in 4 passes "
            "of at most 4");
}

TEST(Batch, that_no_number_of_ranks_can_train_with_is_a_mistake_of_the_config) {
  EXPECT_EQ(mistake_with({{"/train_batch_size", 30},
                          {"/train_micro_batch_size_per_gpu", 4},
                          {"/gradient_accumulation_steps", 2}}),
            "gpt.json:1: train_batch_size 30 is no multiple of train_micro_batch_size_per_gpu 4 × "
            "gradient_accumulation_steps 2 = 8, so no number of ranks can train with it: make it "
            "24 or 32, or leave gradient_accumulation_steps out to have it filled in");
  EXPECT_EQ(mistake_with({{"/train_batch_size", "auto"}}),
            "gpt.json:1: train_batch_size is missing: set it to the samples of a step on all "
            "ranks, or train_micro_batch_size_per_gpu to those of one forward pass on one rank, or "
            "both");
}

}  // namespace lockstep::train
