#include <lockstep/data/data_loader.h>

#include <atomic>
#include <semaphore>
#include <thread>

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "../base/errors.h"
#include "datasets.h"

namespace lockstep::data {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

// All properties hold for every number of workers.
class Loader : public ::testing::TestWithParam<int> {
 protected:
  static int workers() { return GetParam(); }

  static DataLoader make(std::shared_ptr<const Dataset> dataset, SamplerOptions sampler,
                         DataLoaderOptions options) {
    sampler.size = dataset->size();
    options.num_workers = workers();
    return {std::move(dataset), DistributedSampler(sampler), options};
  }
};

TEST_P(Loader, GivesTheSamplersOrder) {
  for (const std::int64_t epoch : {0, 3}) {
    const SamplerOptions options{.size = 23, .num_replicas = 2, .rank = 1, .seed = 5};
    DataLoader loader = make(std::make_shared<Numbers>(23), options, {.batch_size = 3});
    DistributedSampler sampler(options);
    sampler.set_epoch(epoch);
    loader.set_epoch(epoch);
    ASSERT_EQ(loader.num_batches(), 4);
    for (std::int64_t number = 0; number < 4; ++number) {
      const BatchShare expected = sampler.share(number, 3);
      const auto batch = loader.next();
      ASSERT_TRUE(batch);
      EXPECT_EQ(values(batch->target), expected.indices);
      EXPECT_EQ(values(batch->input.select(1, 1)), values(batch->target.mul(2)));
      EXPECT_EQ(batch->rows, expected.rows);
      EXPECT_EQ(batch->global_size, expected.global_size);
      EXPECT_EQ(batch->size(), std::ssize(expected.indices));
    }
    EXPECT_FALSE(loader.next());
    EXPECT_FALSE(loader.next());
  }
}

TEST_P(Loader, AllRanksMakeEquallyManySteps) {
  for (int rank = 0; rank < 4; ++rank) {
    DataLoader loader =
        make(std::make_shared<Numbers>(9), {.num_replicas = 4, .rank = rank, .shuffle = false},
             {.batch_size = 2});
    ASSERT_TRUE(loader.next());
    const auto last = loader.next();
    ASSERT_TRUE(last);
    EXPECT_EQ(last->size(), rank == 0 ? 1 : 0);
    EXPECT_EQ(last->global_size, 1);
    // The batch is empty, but has the right shape and type: a model can run on it.
    EXPECT_EQ(last->input.sizes(), (std::vector<std::int64_t>{last->size(), 2}));
    EXPECT_EQ(last->input.scalar_type(), at::kLong);
    EXPECT_EQ(last->target.sizes(), (std::vector<std::int64_t>{last->size()}));
    EXPECT_THAT(last->rows, SizeIs(static_cast<std::size_t>(last->size())));
    EXPECT_FALSE(loader.next());
  }
}

TEST_P(Loader, CanLeaveOutASmallLastBatch) {
  DataLoader loader =
      make(std::make_shared<Numbers>(9), {.shuffle = false}, {.batch_size = 4, .drop_last = true});
  EXPECT_EQ(loader.num_batches(), 2);
  EXPECT_THAT(remaining(loader), ElementsAre(ElementsAre(0, 1, 2, 3), ElementsAre(4, 5, 6, 7)));
  // A state taken at the end loads as the end of the epoch, too.
  const SamplerState end = loader.state();
  loader.load_state(end);
  EXPECT_FALSE(loader.next());
}

TEST_P(Loader, CanLeaveOutASmallLastStep) {
  const auto numbers = std::make_shared<Numbers>(15);
  DataLoader loader = make(numbers, {.shuffle = false},
                           {.batch_size = 2, .samples_per_step = 6, .drop_last = true});
  EXPECT_EQ(loader.num_batches(), 6) << "seven are whole, but the seventh is no step";
  EXPECT_EQ(loader.num_steps(), 2);
  for (std::int64_t left = 6; left > 0; --left) {
    EXPECT_EQ(loader.batches_left(), left);
    EXPECT_EQ(loader.steps_left(), (left + 2) / 3);
    const auto batch = loader.next();
    ASSERT_TRUE(batch);
    EXPECT_EQ(batch->size(), 2);
  }
  EXPECT_EQ(loader.batches_left(), 0);
  EXPECT_FALSE(loader.next());

  // The smaller steps left 11 samples, which is one step now.
  loader.load_state({.epoch = 1, .position = 4, .size = 15, .seed = loader.state().seed});
  EXPECT_EQ(loader.steps_left(), 1);
  EXPECT_THAT(remaining(loader),
              ElementsAre(ElementsAre(4, 5), ElementsAre(6, 7), ElementsAre(8, 9)));

  DataLoader keeping = make(numbers, {.shuffle = false}, {.batch_size = 2, .samples_per_step = 6});
  EXPECT_EQ(keeping.num_batches(), 8);
  EXPECT_EQ(keeping.num_steps(), 3);
  EXPECT_THAT(remaining(keeping), SizeIs(8));
}

TEST_P(Loader, StepsMayHaveASmallLastBatch) {
  const auto numbers = std::make_shared<Numbers>(13);
  DataLoader loader = make(numbers, {.shuffle = false}, {.batch_size = 2, .samples_per_step = 5});
  EXPECT_EQ(loader.num_batches(), 8);
  EXPECT_EQ(loader.num_steps(), 3);
  EXPECT_THAT(loader.next()->size(), 2);
  EXPECT_EQ(loader.batches_left(), 7);
  EXPECT_EQ(loader.steps_left(), 3) << "one has begun";
  EXPECT_EQ(loader.state().position, 2);
  loader.set_epoch(0);
  EXPECT_THAT(remaining(loader),
              ElementsAre(ElementsAre(0, 1), ElementsAre(2, 3), ElementsAre(4), ElementsAre(5, 6),
                          ElementsAre(7, 8), ElementsAre(9), ElementsAre(10, 11), ElementsAre(12)));
  EXPECT_EQ(loader.state().position, 13);
}

TEST_P(Loader, GoesOnWithOtherSteps) {
  const auto numbers = std::make_shared<Numbers>(13);
  DataLoader loader = make(numbers, {.shuffle = false}, {.batch_size = 3});
  loader.next();
  loader.set_step(4, 5);
  EXPECT_EQ(loader.steps_left(), 2);
  EXPECT_THAT(remaining(loader), ElementsAre(ElementsAre(3, 4, 5, 6), ElementsAre(7),
                                             ElementsAre(8, 9, 10, 11), ElementsAre(12)));
}

TEST_P(Loader, GoesThroughEpochAfterEpoch) {
  DataLoader loader = make(std::make_shared<Numbers>(10), {}, {.batch_size = 3});
  const auto first = remaining(loader);
  loader.set_epoch(1);
  const auto second = remaining(loader);
  EXPECT_THAT(first, SizeIs(4));
  EXPECT_THAT(second, SizeIs(4));
  EXPECT_NE(first, second);
  loader.set_epoch(0);
  loader.next();
  loader.set_epoch(1);  // in the middle of another epoch
  EXPECT_EQ(remaining(loader), second);
}

TEST_P(Loader, ResumesWithExactlyTheRest) {
  const auto dataset = std::make_shared<Numbers>(31);
  const SamplerOptions options{.num_replicas = 2, .seed = 8};
  for (int taken = 0; taken <= 6; ++taken) {
    DataLoader before = make(dataset, options, {.batch_size = 3});
    before.set_epoch(4);
    for (int i = 0; i < taken; ++i) ASSERT_TRUE(before.next());
    const SamplerState state = before.state();
    EXPECT_EQ(state.epoch, 4);
    EXPECT_EQ(state.position, std::min(taken * 6, 31));
    DataLoader after = make(dataset, options, {.batch_size = 3});
    after.next();  // from wherever it was
    after.load_state(state);
    EXPECT_EQ(after.state(), state);
    const auto rest = remaining(before);
    EXPECT_THAT(rest, SizeIs(static_cast<std::size_t>(6 - taken)));
    EXPECT_EQ(remaining(after), rest);
  }
}

TEST_P(Loader, ResumesOnAnotherNumberOfRanks) {
  const auto dataset = std::make_shared<Numbers>(31);
  DataLoader two = make(dataset, {.num_replicas = 2, .seed = 8}, {.batch_size = 3});
  two.next();
  two.next();
  DataLoader one = make(dataset, {.seed = 8}, {.batch_size = 6});
  DataLoader whole = make(dataset, {.seed = 8}, {.batch_size = 6});
  one.load_state(two.state());
  whole.next();
  whole.next();
  EXPECT_EQ(remaining(one), remaining(whole));
}

TEST_P(Loader, AnErrorComesInItsTurnAndCanBeTriedAgain) {
  std::atomic<bool> broken = true;
  const auto dataset = std::make_shared<Numbers>(20, [&](std::span<const std::int64_t> indices) {
    if (broken && indices.front() >= 6) throw std::runtime_error("a disk that is gone");
  });
  DataLoader loader = make(dataset, {.shuffle = false}, {.batch_size = 3});
  ASSERT_TRUE(loader.next());
  ASSERT_TRUE(loader.next());
  for (int again = 0; again < 2; ++again) {
    try {
      loader.next();
      FAIL() << "nothing was thrown";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "a disk that is gone");
    }
    EXPECT_EQ(loader.state().position, 6);
  }
  broken = false;
  const auto batch = loader.next();
  ASSERT_TRUE(batch);
  EXPECT_THAT(values(batch->target), ElementsAre(6, 7, 8));
  EXPECT_THAT(remaining(loader), SizeIs(4));
}

TEST_P(Loader, LoadsWithoutAutograd) {
  std::atomic<bool> enabled = false;
  const auto dataset = std::make_shared<Numbers>(
      4, [&](std::span<const std::int64_t>) { enabled = at::GradMode::is_enabled(); });
  DataLoader loader = make(dataset, {}, {});
  ASSERT_TRUE(loader.next());
  EXPECT_FALSE(enabled);
  EXPECT_TRUE(at::GradMode::is_enabled());
}

TEST_P(Loader, EndsAtAnyPoint) {
  const auto dataset = std::make_shared<Numbers>(40);
  for (int taken = 0; taken <= 10; ++taken) {
    DataLoader loader = make(dataset, {}, {.batch_size = 4, .prefetch = 3});
    for (int i = 0; i < taken; ++i) ASSERT_TRUE(loader.next());
  }
}

TEST_P(Loader, SaysWhereADatasetIsWrong) {
  class Wrong : public Dataset {
   public:
    explicit Wrong(Batch batch) : batch_(std::move(batch)) {}
    std::int64_t size() const override { return 4; }
    Batch batch(std::span<const std::int64_t>) const override { return batch_; }

   private:
    Batch batch_;
  };
  const auto loading = [](const Batch& batch) {
    DataLoader loader = make(std::make_shared<Wrong>(batch), {}, {.batch_size = 2});
    return usage_error([&] { loader.next(); });
  };
  const at::Tensor two = at::zeros({2});
  EXPECT_THAT(loading({.input = at::zeros({3, 1}), .target = two}),
              HasSubstr("asked for 2 samples and gave an input of shape [3, 1]"));
  EXPECT_THAT(loading({.input = two, .target = at::zeros({1})}),
              HasSubstr("a target of shape [1]"));
  EXPECT_THAT(loading({.input = at::zeros({})}), HasSubstr("an input of shape []"));
  EXPECT_THAT(loading({.input = at::Tensor(), .target = two}), HasSubstr("an input of no tensor"));
  // A batch without a target is valid.
  DataLoader loader = make(std::make_shared<Wrong>(Batch{.input = two}), {}, {.batch_size = 2});
  const auto batch = loader.next();
  ASSERT_TRUE(batch);
  EXPECT_FALSE(batch->target.defined());
}

INSTANTIATE_TEST_SUITE_P(Workers, Loader, ::testing::Values(0, 1, 2, 4));

TEST(DataLoader, LoadsAheadByAsMuchAsAsked) {
  std::counting_semaphore<> begun(0);
  std::atomic<int> batches = 0;
  const auto dataset = std::make_shared<Numbers>(100, [&](std::span<const std::int64_t>) {
    ++batches;
    begun.release();
  });
  {
    DataLoader loader(dataset, DistributedSampler({.size = 100}),
                      {.batch_size = 1, .num_workers = 2, .prefetch = 3});
    ASSERT_TRUE(loader.next());
    for (int i = 0; i < 7; ++i) begun.acquire();  // the batch that was returned, and 2 · 3 more
    // Batches that were loaded ahead are no progress.
    EXPECT_EQ(loader.state().position, 1);
  }
  EXPECT_EQ(batches, 7);
}

// The loader is destroyed while workers are inside the dataset: it waits for them.
TEST(DataLoader, EndsWhileBatchesAreBeingLoaded) {
  std::counting_semaphore<> inside(0);
  std::counting_semaphore<> may_go_on(0);
  const auto dataset = std::make_shared<Numbers>(100, [&](std::span<const std::int64_t> indices) {
    if (indices.front() == 0) return;
    inside.release();
    may_go_on.acquire();
  });
  auto loader =
      std::make_unique<DataLoader>(dataset, DistributedSampler({.size = 100, .shuffle = false}),
                                   DataLoaderOptions{.num_workers = 3, .prefetch = 1});
  ASSERT_TRUE(loader->next());
  for (int i = 0; i < 3; ++i) inside.acquire();
  std::thread destroyer([&] { loader.reset(); });
  // Enough for all batches, so that no worker is ever stuck.
  may_go_on.release(100);
  destroyer.join();
}

TEST(DataLoader, TellsHowMuchItIsWaitedFor) {
  const auto dataset = std::make_shared<Numbers>(60);
  // Nothing is computed between the calls, so loading in place takes nearly all of the time.
  DataLoader busy(dataset, DistributedSampler({.size = 60}), {.num_workers = 0});
  EXPECT_EQ(busy.starvation(), 0);
  remaining(busy);
  EXPECT_GT(busy.starvation(), 0.3);
  EXPECT_LE(busy.starvation(), 1);
}

TEST(DataLoader, OptionsThatDoNotFitTogether) {
  const auto dataset = std::make_shared<Numbers>(10);
  const auto making = [&](const DataLoaderOptions& options, std::int64_t size = 10) {
    return usage_error([&] {
      DataLoader loader(dataset, DistributedSampler({.size = size, .num_replicas = 2}), options);
    });
  };
  EXPECT_THAT(making({}, 11), HasSubstr("dataset of 10 samples with a sampler over 11"));
  EXPECT_THAT(making({.batch_size = 0}), HasSubstr("a batch of 0"));
  EXPECT_THAT(making({.num_workers = -1}), HasSubstr("num_workers is -1"));
  EXPECT_THAT(making({.num_workers = 1 << 20}), HasSubstr("num_workers is 1048576"));
  EXPECT_THAT(making({.prefetch = 0}), HasSubstr("prefetch is 0"));
  EXPECT_THAT(
      making({.batch_size = 6, .drop_last = true}),
      HasSubstr("10 samples are less than one step of 12, in 1 batch of 6 a rank on 2 ranks"));
  EXPECT_THAT(making({.batch_size = 2, .samples_per_step = 11, .drop_last = true}),
              HasSubstr("10 samples are less than one step of 11, in 3 batches of 2 a rank"));
  EXPECT_THAT(making({.samples_per_step = -1}), HasSubstr("a step of -1 samples"));
  EXPECT_THAT(making({.pin_memory = true, .device = c10::Device("cpu")}),
              HasSubstr("but the device is cpu"));
  if (at::hasCUDA()) return;
  EXPECT_THAT(making({.pin_memory = true}), HasSubstr("pin_memory needs a GPU"));
  EXPECT_THAT(making({.device = c10::Device("cuda:0")}), HasSubstr("CUDA device needs a GPU"));
}

TEST(DataLoader, PinsAndPutsBatchesOnTheGpu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  const auto dataset = std::make_shared<Numbers>(10);
  const DistributedSampler sampler({.size = 10, .num_replicas = 2, .rank = 1, .shuffle = false});
  for (const int workers : {0, 2}) {
    DataLoader pinned(dataset, sampler,
                      {.batch_size = 4, .num_workers = workers, .pin_memory = true});
    const auto batch = pinned.next();
    ASSERT_TRUE(batch);
    EXPECT_TRUE(batch->input.is_pinned());
    EXPECT_TRUE(batch->target.is_pinned());
    for (const char* device : {"cuda", "cuda:0"}) {
      DataLoader moved(dataset, sampler,
                       {.batch_size = 4, .num_workers = workers, .device = c10::Device(device)});
      const auto first = moved.next();
      ASSERT_TRUE(first);
      EXPECT_TRUE(first->input.is_cuda());
      EXPECT_THAT(values(first->target.cpu()), ElementsAre(1, 3, 5, 7));
      EXPECT_THAT(values(first->target_on_host), ElementsAre(1, 3, 5, 7));
      EXPECT_TRUE(first->target_on_host.is_pinned());
      const auto last = moved.next();
      ASSERT_TRUE(last);
      EXPECT_THAT(values(last->target.cpu()), ElementsAre(9));
    }
  }
}

}  // namespace
}  // namespace lockstep::data
