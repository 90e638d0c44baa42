#include <lockstep/data/torch_dataset.h>

#include <atomic>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/utils/variadic.h>  // map.h does not include it in LibTorch 1.13
#include <torch/data/datasets/map.h>
#include <torch/data/transforms/stack.h>

#include "../base/errors.h"
#include "datasets.h"

namespace lockstep::data {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using torch::data::Example;

// A dataset's size is a std::optional or, before LibTorch 2.5, LibTorch's own optional.
struct Any;
using Size = decltype(std::declval<const torch::data::datasets::BatchDataset<Any>&>().size());

// A dataset as users write it, with get() and size(). Sample k is input [k, k] and target k.
class Plain : public torch::data::datasets::Dataset<Plain> {
 public:
  Example<> get(std::size_t index) override {
    const auto k = static_cast<std::int64_t>(index);
    return {at::tensor({k, k}, at::kLong), at::tensor(k, at::kLong)};
  }
  Size size() const override { return 10; }
};

// A dataset that stacks its samples itself.
class Stacked : public torch::data::datasets::BatchDataset<Stacked, Example<>> {
 public:
  Example<> get_batch(at::ArrayRef<std::size_t> request) override {
    const std::vector<std::int64_t> numbers(request.begin(), request.end());
    const at::Tensor target = at::tensor(numbers, at::kLong);
    return {at::stack({target, target}, 1), target};
  }
  Size size() const override { return 10; }
};

class Endless : public torch::data::datasets::Dataset<Endless> {
 public:
  Example<> get(std::size_t) override { return {at::zeros({1}), at::zeros({1})}; }
  Size size() const override { return {}; }
};

void expect_samples(const Dataset& dataset) {
  EXPECT_EQ(dataset.size(), 10);
  const Batch batch = dataset.batch(std::vector<std::int64_t>{7, 2, 2});
  EXPECT_THAT(values(batch.target), ElementsAre(7, 2, 2));
  EXPECT_EQ(batch.input.sizes(), (std::vector<std::int64_t>{3, 2}));
  EXPECT_THAT(values(batch.input), ElementsAre(7, 7, 2, 2, 2, 2));
}

TEST(TorchDataset, TakesThemAsTheyAre) {
  expect_samples(*from_torch(Plain()));
  expect_samples(*from_torch(Stacked()));
  expect_samples(*from_torch(Plain().map(torch::data::transforms::Stack<>())));
  expect_samples(*from_torch(Plain(), TorchCalls::concurrent));
}

TEST(TorchDataset, GoesIntoALoader) {
  DataLoader loader(
      from_torch(Plain()),
      DistributedSampler({.size = 10, .num_replicas = 3, .rank = 2, .shuffle = false}),
      {.batch_size = 2, .num_workers = 2});
  EXPECT_THAT(remaining(loader), ElementsAre(ElementsAre(2, 5), ElementsAre(8)));
}

TEST(TorchDataset, MustKnowItsSize) {
  EXPECT_THAT(usage_error([] { from_torch(Endless()); }), HasSubstr("does not know its size"));
}

// Counts the threads that are inside at once: a dataset of torch::data may use one file or
// generator.
struct Crowd {
  std::atomic<int> inside = 0;
  std::atomic<bool> met = false;  // two were inside at once
};

class Crowded : public torch::data::datasets::Dataset<Crowded> {
 public:
  Crowded(Crowd& crowd, bool until_met) : crowd_(&crowd), until_met_(until_met) {}

  // Stays until another thread is inside, or else long enough for one to come.
  Example<> get(std::size_t) override {
    if (++crowd_->inside > 1) crowd_->met = true;
    for (int i = 0; !crowd_->met && (until_met_ || i < 1000); ++i) std::this_thread::yield();
    --crowd_->inside;
    return {at::zeros({1}), at::zeros({1})};
  }
  Size size() const override { return 20; }

 private:
  Crowd* crowd_;
  bool until_met_;
};

TEST(TorchDataset, IsCalledByOneThreadAtATimeUnlessToldOtherwise) {
  const auto meet = [](TorchCalls calls) {
    Crowd crowd;
    DataLoader loader(from_torch(Crowded(crowd, calls == TorchCalls::concurrent), calls),
                      DistributedSampler({.size = 20}), {.num_workers = 2});
    while (loader.next()) {
    }
    return crowd.met.load();
  };
  EXPECT_FALSE(meet(TorchCalls::one_at_a_time));
  EXPECT_TRUE(meet(TorchCalls::concurrent));
}

}  // namespace
}  // namespace lockstep::data
