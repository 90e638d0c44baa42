#include <lockstep/optim/grad_scaler.h>

#include <cmath>
#include <limits>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "../base/errors.h"
#include "tensors.h"

namespace lockstep::optim {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::numbers;
using testing::parameter;
using testing::same_bits;
using testing::set_gradient;
using testing::snapshot;
using testing::with_gradient;

constexpr at::ScalarType kTypes[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};

// LibTorch's division, rounded once.
at::Tensor divided(const at::Tensor& gradient, double scale) {
  const auto type = gradient.scalar_type();
  return (gradient.to(type == at::kDouble ? at::kDouble : at::kFloat) / scale).to(type);
}

bool found(const at::Tensor& overflow) {
  EXPECT_EQ(overflow.scalar_type(), at::kFloat);
  EXPECT_EQ(overflow.sizes(), at::IntArrayRef({1}));
  const float value = overflow.item<float>();
  EXPECT_TRUE(value == 0 || value == 1) << value;
  return value != 0;
}

TEST(UnscaleGradients, DividesInPlace) {
  for (const int num_threads : {1, 3}) {
    const Threads threads(num_threads);
    for (const double scale : {65536.0, 1000.0})
      for (const auto type : kTypes) {
        const std::vector<at::Tensor> gradients = {numbers({300, 401}, 1, type),
                                                   numbers({1}, 2, type), numbers({0, 3}, 3, type),
                                                   numbers({}, 4, type)};
        std::vector<NamedParameter> parameters = {{"no gradient", parameter({3}, 5, type)}};
        std::vector<at::Tensor> expected;
        for (const at::Tensor& gradient : gradients) {
          expected.push_back(divided(gradient, scale));
          parameters.push_back(with_gradient(std::to_string(parameters.size()), gradient));
        }
        EXPECT_FALSE(found(unscale_gradients(parameters, scale)));
        EXPECT_FALSE(parameters[0].tensor.grad().defined());
        for (std::size_t i = 0; i < gradients.size(); ++i) {
          EXPECT_TRUE(same_bits(gradients[i], expected[i])) << type << " " << i;
          EXPECT_TRUE(parameters[i + 1].tensor.grad().is_same(gradients[i]));
        }
      }
  }
}

TEST(UnscaleGradients, FindsOneAmongMany) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const auto type : kTypes)
    for (const float bad : {infinity, -infinity, std::nanf("")})
      for (const std::int64_t place : {0, 32767, 32768, 100002}) {
        const at::Tensor gradient = numbers({100003}, 1, type);
        gradient[place] = bad;
        const NamedParameter other = with_gradient("other", numbers({5}, 2));
        const at::Tensor expected = divided(other.tensor.grad(), 16);
        EXPECT_TRUE(found(unscale_gradients({with_gradient("bad", gradient), other}, 16)))
            << type << " " << place;
        EXPECT_TRUE(same_bits(other.tensor.grad(), expected));
      }
}

TEST(UnscaleGradients, Nothing) {
  EXPECT_FALSE(found(unscale_gradients({}, 2)));
  EXPECT_FALSE(found(unscale_gradients({{"no gradient", parameter({3}, 1)}}, 2)));
  EXPECT_FALSE(found(unscale_gradients({with_gradient("empty", at::empty({0, 3}))}, 2)));
}

TEST(UnscaleGradients, AnyStrides) {
  const at::Tensor transposed = numbers({30, 41}, 1).t();
  const at::Tensor columns = numbers({30, 41}, 2).narrow(1, 3, 7);
  const at::Tensor repeated = numbers({30, 1}, 3).expand({30, 5});
  for (const at::Tensor& gradient : {transposed, columns, repeated}) {
    const at::Tensor expected = divided(gradient, 8);
    const NamedParameter a = with_gradient("a", gradient);
    EXPECT_FALSE(found(unscale_gradients({a}, 8)));
    EXPECT_TRUE(same_bits(a.tensor.grad(), expected));
  }
}

// Autograd leaves such gradients if two parameters are added: dividing one must not divide the
// other.
TEST(UnscaleGradients, SharedMemoryIsDividedOnce) {
  const at::Tensor memory = numbers({100}, 1);
  const std::vector<NamedParameter> parameters = {
      with_gradient("all", memory), with_gradient("same", memory.view({10, 10})),
      with_gradient("part", memory.narrow(0, 50, 20)),
      with_gradient("overlaps the part", memory.narrow(0, 60, 40))};
  std::vector<at::Tensor> expected;
  for (const auto& [name, tensor] : parameters) expected.push_back(divided(tensor.grad(), 4));
  EXPECT_FALSE(found(unscale_gradients(parameters, 4)));
  for (std::size_t i = 0; i < parameters.size(); ++i)
    EXPECT_TRUE(same_bits(parameters[i].tensor.grad(), expected[i])) << parameters[i].name;
}

TEST(UnscaleGradients, NeighboursInOneBufferStayThere) {
  const at::Tensor buffer = numbers({100}, 1);
  const at::Tensor expected = divided(buffer, 4);
  EXPECT_FALSE(found(unscale_gradients(
      {with_gradient("b", buffer.narrow(0, 30, 70)), with_gradient("a", buffer.narrow(0, 0, 30))},
      4)));
  EXPECT_TRUE(same_bits(buffer, expected));
}

TEST(UnscaleGradients, RefusesBeforeItChangesAnything) {
  const NamedParameter good = with_gradient("good", numbers({3}, 1));
  const at::Tensor before = snapshot(good.tensor.grad());
  NamedParameter wrong = {"wrong", at::zeros({3}, at::kComplexFloat)};
  set_gradient(wrong.tensor, at::zeros({3}, at::kComplexFloat));
  EXPECT_THAT(usage_error([&] {
                unscale_gradients({good, wrong}, 2);
              }),
              AllOf(HasSubstr("'wrong'"), HasSubstr("ComplexFloat")));
  EXPECT_THAT(usage_error([&] {
                unscale_gradients({good, {"again", good.tensor}}, 2);
              }),
              HasSubstr("'good' and 'again' are one tensor"));
  EXPECT_TRUE(same_bits(good.tensor.grad(), before));
}

TEST(UnscaleGradients, AutogradNoticesTheChange) {
  const NamedParameter a = with_gradient("a", numbers({3}, 1));
  const auto version = a.tensor.grad()._version();
  unscale_gradients({a}, 2);
  EXPECT_GT(a.tensor.grad()._version(), version);
}

TEST(UnscaleWithOperators, AreTheSameBits) {
  for (const double scale : {65536.0, 1000.0, 0.5}) {
    std::vector<at::Tensor> gradients;
    std::vector<NamedParameter> parameters;
    for (const auto type : kTypes) {
      gradients.push_back(numbers({1003}, 1, type));
      parameters.push_back(with_gradient(c10::toString(type), gradients.back().clone()));
    }
    EXPECT_FALSE(found(unscale_with_operators(gradients, scale)));
    unscale_gradients(parameters, scale);
    for (std::size_t i = 0; i < gradients.size(); ++i)
      EXPECT_TRUE(same_bits(gradients[i], parameters[i].tensor.grad())) << scale << " " << i;
  }
}

TEST(UnscaleWithOperators, FindWhatIsNotFinite) {
  for (const auto type : kTypes)
    for (const std::int64_t bad : {0, 500, 1002}) {
      const at::Tensor gradient = numbers({1003}, 1, type);
      gradient[bad] = std::nanf("");
      EXPECT_TRUE(found(unscale_with_operators({numbers({3}, 2), gradient}, 4)));
    }
}

TEST(UnscaleGradients, CudaHasTheSameBits) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  for (const double scale : {65536.0, 1000.0, 0.5})
    for (const bool bad : {false, true}) {
      std::vector<NamedParameter> here;
      std::vector<NamedParameter> there;
      for (const auto type : kTypes)
        for (const std::int64_t count : {1, 1003, 70000}) {
          const at::Tensor gradient = numbers({count}, 1, type);
          if (bad && type == at::kHalf && count == 1003)
            gradient[count - 1] = std::numeric_limits<float>::infinity();
          const std::string name = c10::toString(type) + std::to_string(count);
          here.push_back(with_gradient(name, gradient));
          there.push_back(with_gradient(name, gradient.cuda()));
        }
      const at::Tensor overflow = unscale_gradients(there, scale);
      EXPECT_TRUE(overflow.is_cuda());
      EXPECT_EQ(found(overflow), bad);
      EXPECT_EQ(found(unscale_gradients(here, scale)), bad);
      for (std::size_t i = 0; i < here.size(); ++i)
        EXPECT_TRUE(same_bits(there[i].tensor.grad().cpu(), here[i].tensor.grad()))
            << here[i].name << " " << scale;
    }
}

}  // namespace
}  // namespace lockstep::optim
