#include <lockstep/data/augmented_dataset.h>

#include <map>

#include <ATen/ops/rand.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "../base/errors.h"
#include "datasets.h"

namespace lockstep::data {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::int64_t kSize = 23;

at::Tensor plus_noise(const at::Tensor& input, const at::Generator& random) {
  return input + at::rand(input.sizes(), random, at::TensorOptions(at::kDouble));
}

// What each sample was made to in an epoch, on as many ranks as there are.
std::map<std::int64_t, std::vector<double>> inputs(int num_ranks, int num_workers,
                                                   std::int64_t epoch, std::uint64_t seed = 1) {
  std::map<std::int64_t, std::vector<double>> found;
  for (int rank = 0; rank < num_ranks; ++rank) {
    DataLoader loader(augmented(std::make_shared<Numbers>(kSize), plus_noise, seed),
                      DistributedSampler({.size = kSize, .num_replicas = num_ranks, .rank = rank}),
                      {.batch_size = 4, .num_workers = num_workers});
    loader.set_epoch(epoch);
    while (const auto batch = loader.next())
      for (std::int64_t row = 0; row < batch->size(); ++row) {
        const at::Tensor input = batch->input[row].contiguous();
        found[batch->target[row].item<std::int64_t>()] = {input.data_ptr<double>(),
                                                          input.data_ptr<double>() + input.numel()};
      }
  }
  return found;
}

TEST(AugmentedDataset, ChangesASampleInTheSameWayInEveryLayout) {
  const auto one = inputs(1, 0, 2);
  EXPECT_EQ(one.size(), static_cast<std::size_t>(kSize));
  EXPECT_EQ(one, inputs(1, 3, 2));
  EXPECT_EQ(one, inputs(3, 2, 2));
}

TEST(AugmentedDataset, ChangesItInAnotherWayInEachEpochAndWithEachSeed) {
  const auto first = inputs(1, 1, 0), second = inputs(1, 1, 1), other = inputs(1, 1, 0, 2);
  for (std::int64_t sample = 0; sample < kSize; ++sample) {
    EXPECT_NE(first.at(sample), second.at(sample));
    EXPECT_NE(first.at(sample), other.at(sample));
    // No two numbers are drawn alike.
    const auto noise = [&](std::int64_t of) { return first.at(of)[0] - static_cast<double>(of); };
    EXPECT_NE(noise(sample), noise((sample + 1) % kSize));
  }
}

TEST(AugmentedDataset, GoesOnWithinAnEpoch) {
  const auto whole = inputs(1, 1, 1);
  const auto make = [] {
    return DataLoader(augmented(std::make_shared<Numbers>(kSize), plus_noise, 1),
                      DistributedSampler({.size = kSize}), {.batch_size = 4});
  };
  DataLoader before = make();
  before.set_epoch(1);
  before.next();
  DataLoader after = make();
  after.load_state(before.state());
  const auto batch = after.next();
  ASSERT_TRUE(batch);
  for (std::int64_t row = 0; row < 4; ++row)
    EXPECT_EQ(batch->input[row][0].item<double>(),
              whole.at(batch->target[row].item<std::int64_t>())[0]);
}

TEST(AugmentedDataset, ChangesTargetsWithTheirInputs) {
  const auto swapped =
      augmented(std::make_shared<Numbers>(kSize), [](Sample sample, const at::Generator&) {
        return Sample{.input = sample.target.unsqueeze(0), .target = sample.input[1]};
      });
  const Batch batch = swapped->batch(std::vector<std::int64_t>{3, 5});
  EXPECT_THAT(values(batch.input), ElementsAre(3, 5));
  EXPECT_THAT(values(batch.target), ElementsAre(6, 10));
}

TEST(AugmentedDataset, RefusesWhatIsNoBatch) {
  const auto uneven = augmented(std::make_shared<Numbers>(kSize),
                                [](const at::Tensor& input, const at::Generator&) {
                                  return input.narrow(0, 0, input[0].item<std::int64_t>() % 2 + 1);
                                });
  EXPECT_THAT(usage_error([&] {
                uneven->batch(std::vector<std::int64_t>{3, 4});
              }),
              HasSubstr("made inputs of shapes [2] and [1] for one batch"));
  const auto none = augmented(std::make_shared<Numbers>(kSize),
                              [](const at::Tensor&, const at::Generator&) { return at::Tensor(); });
  EXPECT_THAT(usage_error([&] { none->batch(std::vector<std::int64_t>{3}); }),
              HasSubstr("returned no input"));
  EXPECT_THAT(usage_error([] { augmented(std::shared_ptr<const Dataset>(), plus_noise); }),
              HasSubstr("null pointer"));
}

}  // namespace
}  // namespace lockstep::data
