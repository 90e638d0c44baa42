// Compares a backward pass in two halves with a whole one.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/utils.h>

#include <lockstep/parallel/pipeline/split_backward.h>

namespace lockstep::pipeline {

// B1 is the first half of micro-batch 1, after its forward; W1 is the second half.
inline constexpr const char* kOneByOne = "B0 W0 B1 W1 B2 W2";
inline constexpr const char* kInterleaved = "B0 B1 W0 B2 W1 W2";
inline constexpr const char* kAllAtTheEnd = "B0 B1 B2 W0 W1 W2";

template <typename Model>
struct Case {
  std::function<std::shared_ptr<Model>()> make;
  std::function<at::Tensor()> input;
  // or it returns an output of any shape
  std::function<at::Tensor(Model&, const at::Tensor& input)> loss;
};

inline void expect_same_bits(const at::Tensor& got, const at::Tensor& wanted,
                             const std::string& what) {
  ASSERT_EQ(got.defined(), wanted.defined()) << what;
  if (wanted.defined()) {
    EXPECT_TRUE(got.equal(wanted)) << what;
  }
}

template <typename Model>
void expect_halves_make_a_whole(const Case<Model>& given, const std::string& order) {
  SCOPED_TRACE(order);
  const auto make = [&] {
    torch::manual_seed(1);
    return given.make();
  };
  const auto input_of = [&](int micro_batch) {
    torch::manual_seed(10 + micro_batch);
    return given.input();
  };
  const auto output_of = [&](Model& model, const at::Tensor& input, int micro_batch) {
    torch::manual_seed(100 + micro_batch);  // for dropout
    return given.loss(model, input);
  };
  const auto gradient_of = [](const at::Tensor& output, int micro_batch) {
    if (output.numel() == 1) return at::Tensor();
    torch::manual_seed(1000 + micro_batch);
    return at::randn_like(output);
  };

  const auto whole = make(), halved = make();
  const SplitBackward split(*halved);
  std::map<int, at::Tensor> inputs;
  std::map<int, WeightHalf> rest;
  std::vector<int> second_halves;
  for (std::size_t at = 0; at < order.size(); at += 3) {
    const int micro_batch = order[at + 1] - '0';
    if (order[at] == 'W') {
      rest.at(micro_batch).run();
      EXPECT_TRUE(rest.at(micro_batch).empty());
      second_halves.push_back(micro_batch);
      continue;
    }
    inputs[micro_batch] = input_of(micro_batch);
    const auto output = output_of(*halved, inputs[micro_batch], micro_batch);
    std::map<std::string, at::Tensor> before;
    for (const auto& item : halved->named_parameters())
      if (item.value().grad().defined()) before[item.key()] = item.value().grad().clone();
    rest[micro_batch] = split.backward_input({output}, {gradient_of(output, micro_batch)});
    for (const auto& item : halved->named_parameters())
      expect_same_bits(item.value().grad(), before[item.key()], item.key() + " after a first half");
  }
  for (const int micro_batch : second_halves) {
    const auto input = input_of(micro_batch);
    const auto output = output_of(*whole, input, micro_batch);
    const auto gradient = gradient_of(output, micro_batch);
    output.backward(gradient);
    if (input.is_floating_point())
      expect_same_bits(inputs[micro_batch].grad(), input.grad(), "the input");
  }
  const auto wanted = whole->named_parameters();
  for (const auto& item : halved->named_parameters())
    expect_same_bits(item.value().grad(), wanted[item.key()].grad(), item.key());
}

template <typename Model>
void expect_halves_make_a_whole(const Case<Model>& given) {
  for (const char* const order : {kOneByOne, kInterleaved, kAllAtTheEnd})
    expect_halves_make_a_whole(given, order);
}

}  // namespace lockstep::pipeline
