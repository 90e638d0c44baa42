#include <lockstep/data/sampling/distributed_sampler.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "../base/errors.h"

namespace lockstep::data {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr std::int64_t sizes[] = {1, 2, 3, 7, 8, 12, 30, 61};
constexpr int rank_counts[] = {1, 2, 3, 4, 8};
constexpr std::int64_t batch_sizes[] = {1, 2, 3, 5, 100};

// A global batch put together from the ranks' shares, by rows.
std::vector<std::int64_t> global_batch(SamplerOptions options, std::int64_t epoch,
                                       std::int64_t number, std::int64_t batch_per_rank) {
  std::vector<std::int64_t> samples;
  for (options.rank = 0; options.rank < options.num_replicas; ++options.rank) {
    DistributedSampler sampler(options);
    sampler.set_epoch(epoch);
    const BatchShare share = sampler.share(number, batch_per_rank);
    samples.resize(static_cast<std::size_t>(share.global_size), -1);
    EXPECT_EQ(share.indices.size(), share.rows.size());
    EXPECT_LE(std::ssize(share.indices), batch_per_rank);
    for (std::size_t i = 0; i < share.rows.size(); ++i)
      samples.at(static_cast<std::size_t>(share.rows[i])) = share.indices[i];
  }
  return samples;
}

// The order of an epoch as all ranks together see it.
std::vector<std::int64_t> whole_epoch(const SamplerOptions& options, std::int64_t epoch,
                                      std::int64_t batch_per_rank) {
  std::vector<std::int64_t> samples;
  const std::int64_t batches = DistributedSampler(options).num_global_batches(batch_per_rank);
  for (std::int64_t number = 0; number < batches; ++number) {
    const auto batch = global_batch(options, epoch, number, batch_per_rank);
    if (number + 1 < batches) {
      EXPECT_EQ(std::ssize(batch), batch_per_rank * options.num_replicas);
    }
    samples.insert(samples.end(), batch.begin(), batch.end());
  }
  return samples;
}

void sweep(const std::function<void(const SamplerOptions&, std::int64_t)>& check) {
  for (const std::int64_t size : sizes)
    for (const int ranks : rank_counts)
      for (const std::int64_t batch : batch_sizes)
        for (const bool shuffle : {false, true}) {
          SCOPED_TRACE(fmt::format("{} samples on {} ranks, batches of {}, shuffle {}", size, ranks,
                                   batch, shuffle));
          check({.size = size, .num_replicas = ranks, .shuffle = shuffle, .seed = 9}, batch);
        }
}

TEST(DistributedSampler, UsesEachSampleOnce) {
  sweep([](const SamplerOptions& options, std::int64_t batch) {
    for (const std::int64_t epoch : {0, 1}) {
      std::vector<std::int64_t> samples = whole_epoch(options, epoch, batch);
      std::sort(samples.begin(), samples.end());
      std::vector<std::int64_t> all(static_cast<std::size_t>(options.size));
      std::iota(all.begin(), all.end(), 0);
      EXPECT_EQ(samples, all);
    }
  });
}

// The number of ranks changes which rank works on a sample, not which samples are worked on.
TEST(DistributedSampler, GlobalBatchesDoNotDependOnTheRanks) {
  for (const std::int64_t size : {24, 50, 61}) {
    for (const std::int64_t global : {8, 12, 24}) {
      const SamplerOptions alone{.size = size, .seed = 3};
      const std::int64_t batches = DistributedSampler(alone).num_global_batches(global);
      for (const int ranks : {1, 2, 3, 4, 6, 8, 12, 24}) {
        if (global % ranks != 0) continue;
        SamplerOptions options = alone;
        options.num_replicas = ranks;
        ASSERT_EQ(DistributedSampler(options).num_global_batches(global / ranks), batches);
        for (std::int64_t number = 0; number < batches; ++number)
          EXPECT_EQ(global_batch(options, 5, number, global / ranks),
                    global_batch(alone, 5, number, global))
              << size << " samples, batch " << number << " of " << global << " on " << ranks;
      }
    }
  }
}

// The result of PyTorch's DistributedSampler(range(size), ranks, rank, shuffle=False, drop_last).
std::vector<std::int64_t> pytorch(std::int64_t size, int ranks, int rank, bool drop_last) {
  std::vector<std::int64_t> indices(static_cast<std::size_t>(size));
  std::iota(indices.begin(), indices.end(), 0);
  const std::int64_t total =
      (drop_last ? size / ranks : (size + ranks - 1) / ranks) * std::int64_t{ranks};
  while (std::ssize(indices) < total)
    indices.push_back(indices[indices.size() - static_cast<std::size_t>(size)]);
  std::vector<std::int64_t> mine;
  for (std::int64_t k = rank; k < total; k += ranks)
    mine.push_back(indices[static_cast<std::size_t>(k)]);
  return mine;
}

std::vector<std::int64_t> samples_of_rank(const SamplerOptions& options, std::int64_t batch) {
  const DistributedSampler sampler(options);
  std::vector<std::int64_t> mine;
  for (std::int64_t number = 0; number < sampler.num_global_batches(batch); ++number) {
    const auto share = sampler.share(number, batch).indices;
    mine.insert(mine.end(), share.begin(), share.end());
  }
  EXPECT_EQ(std::ssize(mine), sampler.num_samples());
  return mine;
}

TEST(DistributedSampler, IsPyTorchsWithoutShuffling) {
  for (const std::int64_t size : sizes)
    for (const int ranks : rank_counts)
      for (int rank = 0; rank < ranks; ++rank) {
        SamplerOptions options{.size = size, .num_replicas = ranks, .rank = rank, .shuffle = false};
        SCOPED_TRACE(fmt::format("{} samples, rank {} of {}", size, rank, ranks));
        if (size % ranks == 0) {
          EXPECT_EQ(samples_of_rank(options, 3), pytorch(size, ranks, rank, false));
        }
        options.pad_with_repeats = true;
        EXPECT_EQ(samples_of_rank(options, 3), pytorch(size, ranks, rank, false));
        if (size < ranks) continue;
        options.pad_with_repeats = false;
        options.drop_last = true;
        EXPECT_EQ(samples_of_rank(options, 3), pytorch(size, ranks, rank, true));
      }
}

TEST(DistributedSampler, TheLastBatchMayLeaveRanksWithout) {
  SamplerOptions options{.size = 9, .num_replicas = 4, .shuffle = false};
  const auto last = [&](int rank) {
    options.rank = rank;
    return DistributedSampler(options).share(1, 2);
  };
  EXPECT_THAT(last(0).indices, ElementsAre(8));
  EXPECT_THAT(last(0).rows, ElementsAre(0));
  for (const int rank : {1, 2, 3}) {
    EXPECT_THAT(last(rank).indices, IsEmpty());
    EXPECT_EQ(last(rank).global_size, 1);
  }
}

TEST(DistributedSampler, ShufflesAnewEachEpoch) {
  const SamplerOptions options{.size = 50, .seed = 1};
  EXPECT_EQ(whole_epoch(options, 2, 7), whole_epoch(options, 2, 5));
  EXPECT_NE(whole_epoch(options, 2, 7), whole_epoch(options, 3, 7));
  EXPECT_NE(whole_epoch(options, 2, 7), whole_epoch({.size = 50, .seed = 2}, 2, 7));
}

TEST(DistributedSampler, GoesOnFromAnyPosition) {
  const SamplerOptions options{.size = 23, .num_replicas = 2, .rank = 1, .seed = 4};
  DistributedSampler before(options);
  before.set_epoch(6);
  DistributedSampler after({.size = 23, .num_replicas = 2, .rank = 1, .seed = 4});
  const std::int64_t position = after.load_state(before.state(12));
  EXPECT_EQ(position, 12);
  EXPECT_EQ(after.epoch(), 6);
  EXPECT_EQ(after.share_at(position, 3).indices, before.share(2, 3).indices);
  // With another number of ranks and another batch size, the order from there on is the same.
  DistributedSampler alone({.size = 23, .seed = 4});
  alone.load_state(before.state(12));
  EXPECT_EQ(alone.share_at(12, 4).indices[1], before.share_at(12, 2).indices[0]);
}

TEST(DistributedSampler, RefusesThePositionOfAnotherOrder) {
  DistributedSampler sampler({.size = 10, .seed = 1});
  SamplerState state = sampler.state(4);
  state.size = 11;
  EXPECT_THAT(usage_error([&] { sampler.load_state(state); }),
              HasSubstr("is of 11 samples with seed 1, but this run has 10 with seed 1"));
  state = sampler.state(4);
  state.seed = 2;
  EXPECT_THAT(usage_error([&] { sampler.load_state(state); }), HasSubstr("another order"));
  state = sampler.state(-1);
  EXPECT_THAT(usage_error([&] { sampler.load_state(state); }), HasSubstr("position is -1"));
  state = sampler.state(0);
  state.epoch = -1;
  EXPECT_THAT(usage_error([&] { sampler.load_state(state); }), HasSubstr("epoch -1"));
  // Without shuffling the seed does not matter.
  DistributedSampler plain({.size = 10, .shuffle = false, .seed = 2});
  EXPECT_EQ(plain.load_state(sampler.state(4)), 4);
  EXPECT_EQ(plain.load_state(sampler.state(1000)), 10);
}

TEST(DistributedSampler, OptionsThatMakeNoSense) {
  const auto making = [](const SamplerOptions& options) {
    return usage_error([&] { DistributedSampler sampler(options); });
  };
  EXPECT_THAT(making({}), HasSubstr("over 0 samples"));
  EXPECT_THAT(making({.size = -1}), HasSubstr("over -1 samples"));
  EXPECT_THAT(making({.size = 4, .num_replicas = 0}), HasSubstr("rank 0 of 0"));
  EXPECT_THAT(making({.size = 4, .num_replicas = 2, .rank = 2}), HasSubstr("rank 2 of 2"));
  EXPECT_THAT(making({.size = 4, .rank = -1}), HasSubstr("rank -1 of 1"));
  EXPECT_THAT(making({.size = 3, .num_replicas = 4, .drop_last = true}),
              HasSubstr("3 samples on 4 ranks leave none"));
  EXPECT_THAT(making({.size = 3, .drop_last = true, .pad_with_repeats = true}),
              HasSubstr("cannot both"));
  DistributedSampler sampler({.size = 4, .num_replicas = 2});
  EXPECT_THAT(usage_error([&] { sampler.num_global_batches(0); }), HasSubstr("a batch of 0"));
  EXPECT_THAT(
      usage_error([&] { sampler.num_global_batches(std::numeric_limits<std::int64_t>::max()); }),
      HasSubstr("a batch of 9223372036854775807"));
  EXPECT_THAT(usage_error([&] { sampler.share(2, 1); }), HasSubstr("global batch 2 of"));
  EXPECT_THAT(usage_error([&] { sampler.share(-1, 1); }), HasSubstr("global batch -1 of"));
  EXPECT_THAT(usage_error([&] { sampler.share_at(4, 1); }), HasSubstr("from position 4"));
  EXPECT_THAT(usage_error([&] { sampler.index_at(4); }), HasSubstr("position 4"));
  EXPECT_THAT(usage_error([&] { sampler.set_epoch(-1); }), HasSubstr("epoch -1"));
}

}  // namespace
}  // namespace lockstep::data
