// The guarantees of a Construction besides the values: errors, lifetimes, threads.
#include <lockstep/deferred/construction.h>

#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/utils.h>

#include "../base/errors.h"
#include "large_tensor.h"
#include "same_bits.h"

namespace lockstep::deferred {
namespace {

using testing::generator_state;
using ::testing::HasSubstr;
using testing::large;
using testing::same_bits;

at::Tensor expected_large(std::uint64_t seed) {
  torch::manual_seed(seed);
  return large();
}

TEST(Construction, ReturnsWhatTheFunctionReturned) {
  Construction construction;
  EXPECT_EQ(construction.construct([] { return 5; }), 5);
  const auto module = construction.construct([] { return torch::nn::Linear(200, 200); });
  EXPECT_TRUE(construction.is_deferred(module->weight));
  EXPECT_FALSE(construction.is_deferred(module->bias));
  EXPECT_TRUE(module->weight.requires_grad());
}

TEST(Construction, IsOverWhenTheFunctionReturns) {
  Construction construction;
  construction.construct([] { return large(); });
  EXPECT_FALSE(construction.is_deferred(large()));
}

TEST(Construction, AnExceptionEndsItAndLeavesNothing) {
  const at::Tensor expected = expected_large(1);
  Construction construction;
  at::Tensor escaped;
  torch::manual_seed(1);
  EXPECT_THROW(construction.construct([&]() -> int {
    const at::Tensor lost = torch::ones({300, 300});
    escaped = large();
    lost.add_(escaped.norm().item());
    throw std::runtime_error("no");
  }),
               std::runtime_error);
  EXPECT_EQ(construction.bytes(), 0);
  EXPECT_FALSE(construction.is_deferred(large()));
  EXPECT_TRUE(same_bits(escaped, expected));
  EXPECT_TRUE(construction.is_deferred(construction.construct([] { return large(); })));
}

TEST(Construction, InsideOfAnotherIsRefused) {
  Construction outer;
  Construction other;
  for (Construction* const inner : {&outer, &other}) {
    const auto nested = [&] { return inner->construct([] { return large(); }); };
    EXPECT_THAT(usage_error([&] { outer.construct(nested); }), HasSubstr("inside of another"));
  }
  // The outer construction goes on if the program catches the error.
  const at::Tensor tensor = outer.construct([&] {
    EXPECT_THROW(other.construct([] { return 1; }), UsageError);
    return large();
  });
  EXPECT_TRUE(outer.is_deferred(tensor));
}

TEST(Construction, OfSeveralModelsOneAfterTheOther) {
  torch::manual_seed(1);
  const at::Tensor expected_first = large();
  const at::Tensor expected_second = large();
  Construction construction;
  torch::manual_seed(1);
  const at::Tensor first = construction.construct([] { return large(); });
  const at::Tensor second = construction.construct([&] {
    first.add_(1);
    return large();
  });
  EXPECT_TRUE(same_bits(second, expected_second));
  EXPECT_TRUE(same_bits(first, expected_first + 1));
}

TEST(Construction, OfAnotherModelWhileValuesAreHeld) {
  const at::Tensor expected = expected_large(1);
  Construction construction;
  torch::manual_seed(1);
  const at::Tensor first = construction.construct([] { return large(); });
  {
    const auto values = construction.materialise(std::array{first});
    construction.construct([] { return large(); });
  }
  EXPECT_TRUE(same_bits(first, expected));
}

TEST(Construction, TensorsOfTwoMeet) {
  torch::manual_seed(1);
  at::Tensor expected_a = large();
  at::Tensor expected_b = large();
  const at::Tensor expected_sum = expected_a + expected_b;
  expected_a.add_(expected_b);
  expected_b.copy_(expected_a);

  torch::manual_seed(1);
  Construction first;
  Construction second;
  const at::Tensor a = first.construct([] { return large(); });
  EXPECT_TRUE(first.is_deferred(a));
  EXPECT_FALSE(second.is_deferred(a));
  second.keep(std::array{a});
  EXPECT_TRUE(first.is_deferred(a));
  const auto [b, sum] = second.construct([&] {
    at::Tensor tensor = large();
    at::Tensor both = a + tensor;
    a.add_(tensor);
    tensor.copy_(a);
    return std::pair(tensor, both);
  });
  EXPECT_TRUE(same_bits(sum, expected_sum));
  EXPECT_TRUE(same_bits(a, expected_a));
  EXPECT_TRUE(same_bits(b, expected_b));
}

TEST(Construction, WhoseValuesWereNotAskedForMustNotGo) {
  at::Tensor deferred;
  at::Tensor kept;
  at::Tensor view_of_kept;
  at::Tensor held;
  std::optional<Materialised> values;
  {
    Construction construction;
    std::tie(deferred, kept, held) = construction.construct([] {
      return std::tuple(large(), torch::ones({200, 200}), large());
    });
    view_of_kept = kept.t();
    construction.keep(std::array{kept});
    values = construction.materialise(std::array{held});
  }
  EXPECT_NE(held.abs().sum().item<float>(), 0);
  values.reset();
  EXPECT_EQ(kept.sum().item<float>(), 40000);
  EXPECT_EQ(view_of_kept.sum().item<float>(), 40000);
  EXPECT_THAT(usage_error([&] { deferred.sum(); }), HasSubstr("Construction"));
}

TEST(Construction, ErrorsComeWhereTheyWouldHaveCome) {
  Construction construction;
  construction.construct([] {
    const torch::nn::Linear linear(200, 200);
    // The weight is a leaf that requires a gradient.
    EXPECT_THROW(linear->weight.normal_(), c10::Error);
    const torch::NoGradGuard no_grad;
    // These shapes do not fit together.
    EXPECT_THROW(linear->weight.copy_(torch::ones({3, 7})), c10::Error);
    EXPECT_THROW(linear->weight.add_(torch::ones({201})), c10::Error);
    EXPECT_THROW(linear->weight.matmul(torch::ones({201, 200})), c10::Error);
    EXPECT_THROW(linear->weight.normal_(0, -1), c10::Error);
    return 0;
  });
}

TEST(Construction, WhatIsWrittenToMaterialisedTensorsStays) {
  at::Tensor expected = expected_large(1);
  Construction construction;
  torch::manual_seed(1);
  const at::Tensor tensor = construction.construct([] { return large(); });
  {
    const auto values = construction.materialise(std::array{tensor});
    tensor.mul_(2);
    EXPECT_TRUE(same_bits(tensor, expected.mul_(2)));
  }
  EXPECT_EQ(construction.bytes(), 0);
  tensor.add_(1);
  EXPECT_TRUE(same_bits(tensor, expected.add_(1)));
  std::string state;
  {
    const auto values = construction.materialise(std::array{tensor});
    torch::manual_seed(7);
    tensor.slice(0, 0, 100).normal_();
    state = generator_state();
    torch::manual_seed(7);
    expected.slice(0, 0, 100).normal_();
    EXPECT_TRUE(generator_state() == state);
  }
  EXPECT_TRUE(same_bits(tensor, expected));
}

TEST(Construction, AWriteIsANewVersionOfTheTensor) {
  Construction construction;
  const auto versions = construction.construct([] {
    const at::Tensor tensor = torch::zeros({200, 200});
    const auto before = tensor._version();
    tensor.add_(1);
    return std::pair(before, tensor._version());
  });
  EXPECT_EQ(versions.second, versions.first + 1);
}

TEST(Construction, OtherThreadsMayWriteToItsTensors) {
  const auto construct = [](at::Tensor& made_elsewhere) {
    const at::Tensor tensor = torch::empty({200, 200});
    std::thread([&] {
      tensor.fill_(3);
      tensor.slice(0, 0, 100).uniform_();
      made_elsewhere = torch::ones({200, 200});
      tensor.add_(made_elsewhere);
    }).join();
    return tensor;
  };
  at::Tensor elsewhere;
  torch::manual_seed(1);
  const at::Tensor expected = construct(elsewhere);
  torch::manual_seed(1);
  Construction construction;
  const at::Tensor tensor = construction.construct([&] { return construct(elsewhere); });
  EXPECT_TRUE(construction.is_deferred(tensor));
  EXPECT_FALSE(construction.is_deferred(elsewhere));
  EXPECT_TRUE(same_bits(tensor, expected));
}

TEST(Construction, OnSeveralThreadsAtOnce) {
  const auto construct = [](std::uint64_t seed) {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
    std::vector<at::Tensor> tensors;
    for (int i = 0; i < 20; ++i)
      tensors.push_back(torch::empty({100, 200}).normal_(0, 1, generator).mul(2));
    return tensors;
  };
  std::vector<std::thread> threads;
  for (std::uint64_t seed = 0; seed < 4; ++seed)
    threads.emplace_back([&, seed] {
      const auto expected = construct(seed);
      Construction construction;
      const auto tensors = construction.construct([&] { return construct(seed); });
      for (std::size_t i = tensors.size(); i-- > 0;)
        EXPECT_TRUE(same_bits(tensors[i], expected[i])) << seed << ' ' << i;
    });
  for (std::thread& thread : threads) thread.join();
}

TEST(Construction, SeveralThreadsMayAskForTheSameValues) {
  const at::Tensor expected = expected_large(1);
  Construction construction;
  torch::manual_seed(1);
  const at::Tensor tensor = construction.construct([] { return large(); });
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] {
      for (int k = 0; k < 20; ++k) {
        EXPECT_TRUE(same_bits(tensor, expected));
        const auto values = construction.materialise(std::array{tensor});
        EXPECT_TRUE(same_bits(tensor, expected));
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(construction.bytes(), 0);
}

TEST(Construction, InInferenceMode) {
  const c10::InferenceMode inference;
  const auto make = [] { return torch::randn({200, 200}).mul_(2).add(1); };
  torch::manual_seed(1);
  const at::Tensor expected = make();
  Construction construction;
  torch::manual_seed(1);
  const at::Tensor tensor = construction.construct(make);
  EXPECT_TRUE(construction.is_deferred(tensor));
  EXPECT_TRUE(tensor.is_inference());
  EXPECT_TRUE(same_bits(tensor, expected));
}

TEST(Construction, ATypeChangedAfterwards) {
  torch::manual_seed(1);
  torch::nn::Linear expected(200, 200);
  expected->to(torch::kDouble);
  Construction construction;
  torch::manual_seed(1);
  auto linear = construction.construct([] { return torch::nn::Linear(200, 200); });
  linear->to(torch::kDouble);
  EXPECT_TRUE(same_bits(linear->weight, expected->weight));
}

TEST(Construction, AModelThatIsKeptTrains) {
  const auto make = [] {
    return torch::nn::Sequential(torch::nn::Linear(150, 150), torch::nn::BatchNorm1d(150),
                                 torch::nn::Linear(150, 150));
  };
  const auto step = [](torch::nn::Sequential& model) {
    torch::manual_seed(5);
    model->forward(torch::randn({8, 150})).square().mean().backward();
    const torch::NoGradGuard no_grad;
    for (auto& parameter : model->parameters()) parameter.sub_(parameter.grad(), 0.1);
  };
  torch::manual_seed(1);
  auto expected = make();
  torch::manual_seed(1);
  Construction construction;
  auto model = construction.construct(make);
  construction.keep(model->parameters());
  construction.keep_all();
  for (int i = 0; i < 3; ++i) {
    step(expected);
    step(model);
  }
  for (std::size_t i = 0; i < expected->parameters().size(); ++i)
    EXPECT_TRUE(same_bits(model->parameters()[i], expected->parameters()[i]));
}

TEST(Construction, WhatOthersAreMadeFromMayBeKeptAndChange) {
  const at::Tensor expected = expected_large(1);
  Construction construction;
  torch::manual_seed(1);
  const auto [source, copy] = construction.construct([] {
    const at::Tensor source = large();
    return std::pair(source, source.clone());
  });
  construction.keep(std::array{source});
  source.zero_();
  EXPECT_TRUE(same_bits(copy, expected));
}

}  // namespace
}  // namespace lockstep::deferred
