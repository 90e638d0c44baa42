#include <lockstep/intercept/owner.h>

#include <functional>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <lockstep/base/error.h>

namespace lockstep::intercept {
namespace {

using ::testing::AnyOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

struct Heard {
  std::string op;
  std::size_t num_uses = 0;
  bool written = false;
};

class Listener : public Owner {
 public:
  void on_call(Call& call, std::span<const Use> uses) override {
    bool written = false;
    for (const Use& use : uses) written = written || use.written;
    heard.push_back({call.op().operator_name().name, uses.size(), written});
    if (before) before(call);
    if (decomposes)
      call.decompose();
    else
      call.proceed();
  }
  std::vector<std::string> ops() const {
    std::vector<std::string> names;
    for (const Heard& one : heard) names.push_back(one.op);
    return names;
  }

  std::vector<Heard> heard;
  std::function<void(Call&)> before;
  bool decomposes = false;
};

class Intercept : public ::testing::Test {
 protected:
  Intercept() { claim_key(); }

  at::Tensor tagged(const at::Tensor& tensor, std::string when_gone = {}) {
    tag(tensor);
    add_owner(tensor.storage(), listener, std::move(when_gone));
    return tensor;
  }

  std::shared_ptr<Listener> listener = std::make_shared<Listener>();
};

TEST_F(Intercept, OperatorsOnATaggedTensorComeToItsOwner) {
  const at::Tensor tensor = tagged(at::ones({3}));
  EXPECT_EQ(at::add(tensor, tensor).sum().item<float>(), 6);
  EXPECT_THAT(listener->ops(), ElementsAre("aten::add"));
  EXPECT_EQ(listener->heard[0].num_uses, 2u);
  EXPECT_FALSE(listener->heard[0].written);
}

TEST_F(Intercept, OperatorsOnOtherTensorsDoNot) {
  tagged(at::ones({3}));
  at::add(at::ones({3}), at::ones({3}));
  EXPECT_THAT(listener->heard, IsEmpty());
}

TEST_F(Intercept, ViewsLeadThereAndCopiesDoNot) {
  const at::Tensor tensor = tagged(at::ones({3, 2}));
  const at::Tensor view = tensor.t().narrow(0, 1, 1);
  EXPECT_TRUE(is_tagged(view));
  const at::Tensor copy = tensor.clone();
  EXPECT_FALSE(is_tagged(copy));
}

TEST_F(Intercept, TensorsInListsAreFound) {
  const at::Tensor tensor = tagged(at::ones({3}));
  at::cat({at::zeros({1}), tensor});
  at::zeros({4}).index({c10::optional<at::Tensor>(tagged(at::ones({2}, at::kLong)))});
  EXPECT_THAT(listener->ops(), ElementsAre("aten::cat", "aten::index"));
}

TEST_F(Intercept, WritesAreTold) {
  const at::Tensor tensor = tagged(at::ones({3}));
  tensor.mul_(2);
  at::zeros({3}).add_(tensor);
  at::Tensor out = tensor;
  at::add_out(out, at::ones({3}), at::ones({3}));
  ASSERT_EQ(listener->heard.size(), 3u);
  EXPECT_TRUE(listener->heard[0].written);
  EXPECT_FALSE(listener->heard[1].written);
  EXPECT_TRUE(listener->heard[2].written);
}

TEST_F(Intercept, OperatorsInsideOfOneThatWasHeardOfAreNotHeardOf) {
  const at::Tensor weight = tagged(at::ones({2, 3}));
  at::linear(at::ones({1, 3}), weight);
  EXPECT_THAT(listener->ops(), ElementsAre("aten::linear"));
}

TEST_F(Intercept, UnlessAnOwnerAsksForThem) {
  const auto second = std::make_shared<Listener>();
  listener->decomposes = true;
  const at::Tensor weight = tagged(at::ones({2, 3}));
  add_owner(weight.storage(), second);
  EXPECT_EQ(at::linear(at::ones({1, 3}), weight).sum().item<float>(), 6);
  EXPECT_EQ(listener->ops().front(), "aten::linear");
  EXPECT_THAT(listener->ops(), Contains("aten::mm"));
  EXPECT_EQ(second->ops(), listener->ops());
}

TEST_F(Intercept, ATensorStaysTheSameObject) {
  torch::nn::Linear layer(3, 2);
  const auto* const before = layer->weight.unsafeGetTensorImpl();
  tagged(layer->weight);
  EXPECT_EQ(layer->weight.unsafeGetTensorImpl(), before);
  EXPECT_TRUE(layer->weight.requires_grad());
  EXPECT_TRUE(layer->weight.is_leaf());
}

TEST_F(Intercept, BackwardIsHeardOfOnItsOwnThread) {
  torch::nn::Linear layer(3, 2);
  tagged(layer->weight);
  const at::Tensor input = at::ones({4, 3}).requires_grad_();
  const at::Tensor loss = layer->forward(input).sum();
  listener->heard.clear();
  std::thread([&] { loss.backward(); }).join();
  EXPECT_FALSE(listener->heard.empty());
  EXPECT_TRUE(layer->weight.grad().defined());
  EXPECT_FALSE(is_tagged(layer->weight.grad()));
  EXPECT_TRUE(input.grad().defined());
}

TEST_F(Intercept, AnOwnerMayAnswerInPlaceOfTheOperator) {
  class Answering : public Owner {
    void on_call(Call& call, std::span<const Use>) override {
      torch::jit::drop(call.stack(), call.arguments().size());
      torch::jit::push(call.stack(), at::full({1}, 7.0));
    }
  };
  const auto owner = std::make_shared<Answering>();
  const at::Tensor tensor = at::ones({1});
  tag(tensor);
  add_owner(tensor.storage(), owner);
  EXPECT_EQ(at::neg(tensor).item<float>(), 7);
}

TEST_F(Intercept, SeveralOwnersHearOfACallInOrderEachOfItsOwnTensors) {
  const auto second = std::make_shared<Listener>();
  const at::Tensor a = tagged(at::ones({1}));
  const at::Tensor b = at::ones({1});
  tag(b);
  add_owner(b.storage(), second);
  at::cat({a, b, a});
  ASSERT_THAT(listener->ops(), ElementsAre("aten::cat"));
  ASSERT_THAT(second->ops(), ElementsAre("aten::cat"));
  EXPECT_EQ(listener->heard[0].num_uses, 2u);
  EXPECT_EQ(second->heard[0].num_uses, 1u);
}

TEST_F(Intercept, AnOwnerMayHaveTheFirstTurn) {
  std::vector<int> turns;
  const auto second = std::make_shared<Listener>();
  listener->before = [&](Call&) { turns.push_back(2); };
  second->before = [&](Call&) { turns.push_back(1); };
  const at::Tensor tensor = tagged(at::ones({1}));
  add_owner(tensor.storage(), second, {}, Turn::first);
  at::neg(tensor);
  EXPECT_THAT(turns, ElementsAre(1, 2));
}

// LibTorch's error does not say which tensor it is about.
TEST_F(Intercept, AdviceOnMemoryThatIsNotThereIsGivenWhereItMayBeOurs) {
  const auto read = [](const at::Tensor& tensor) -> std::string {
    try {
      tensor.data_ptr<float>();
    } catch (const std::exception& error) {
      return error.what();
    }
    return "";
  };
  const auto without_memory = [] {
    const at::Tensor tensor = at::ones({3});
    tensor.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(
        c10::DataPtr(nullptr, c10::Device(at::kCPU)));
    return tensor;
  };
  const at::Tensor theirs = without_memory();
  EXPECT_THAT(read(theirs), Not(AnyOf(IsEmpty(), HasSubstr("Lockstep:"))));
  const at::Tensor ours = tagged(without_memory());
  EXPECT_THAT(read(ours), HasSubstr("Lockstep: if this tensor is a parameter that is cut"));
  EXPECT_THAT(read(theirs), HasSubstr("Lockstep: if this tensor"));
  EXPECT_THAT(read(at::ones({3}, at::kDouble)),
              AllOf(HasSubstr("Double"), Not(HasSubstr("Lockstep:"))))
      << "it is another error, whatever else is without memory";
}

TEST_F(Intercept, WhatAnOwnerThrowsComesOutOfTheOperator) {
  listener->before = [](Call&) { throw UsageError("not now"); };
  const at::Tensor tensor = tagged(at::ones({1}));
  EXPECT_THROW(at::neg(tensor), UsageError);
}

TEST_F(Intercept, OnceItsOwnerIsGoneATensorIsPlainAgain) {
  const at::Tensor tensor = tagged(at::ones({1}));
  listener.reset();
  EXPECT_EQ(at::neg(tensor).item<float>(), -1);
}

TEST_F(Intercept, OrRefusesWhereItsOwnerWasNotToGoFirst) {
  const at::Tensor tensor = tagged(at::ones({1}), "its manager is gone");
  listener.reset();
  EXPECT_THROW(at::neg(tensor), UsageError);
}

TEST_F(Intercept, RemovedOwnersHearNothing) {
  const at::Tensor tensor = tagged(at::ones({1}), "gone");
  remove_owner(tensor.storage(), listener.get());
  at::neg(tensor);
  EXPECT_THAT(listener->heard, IsEmpty());
}

TEST_F(Intercept, UntaggedTensorsLeadNowhere) {
  const at::Tensor tensor = tagged(at::ones({1}));
  untag(tensor);
  at::neg(tensor);
  EXPECT_THAT(listener->heard, IsEmpty());
}

TEST_F(Intercept, MemoryThatIsGoneIsNotTakenForWhatComesToLieThere) {
  for (int i = 0; i < 100; ++i) tagged(at::ones({1}));
  for (int i = 0; i < 100; ++i) {
    const at::Tensor other = at::ones({1});
    tag(other);
    at::neg(other);
  }
  EXPECT_THAT(listener->heard, IsEmpty());
}

}  // namespace
}  // namespace lockstep::intercept
