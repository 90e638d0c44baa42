// A constructor that uses values through a pointer which are not there is refused, whatever becomes
// of the tensor; any other constructor is not.
#include <array>
#include <cstring>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/serialize.h>
#include <torch/types.h>

#include <lockstep/deferred/construction.h>

#include "../base/errors.h"
#include "large_tensor.h"
#include "same_bits.h"

namespace lockstep::deferred {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::large;
using testing::same_bits;

// The read is volatile, because a compiler leaves out reads that nobody needs.
float first_of(const at::Tensor& tensor) {
  return *static_cast<const volatile float*>(tensor.data_ptr<float>());
}

void write_first(const at::Tensor& tensor, float value) { tensor.data_ptr<float>()[0] = value; }

// The error of construct() for this constructor.
std::string refusal(const std::function<at::Tensor()>& make) {
  Construction construction;
  return usage_error([&] { construction.construct(make); });
}

// Expects that the constructor makes the same tensors deferred as it does otherwise.
void expect_as_ever(const std::function<at::Tensor()>& make) {
  torch::manual_seed(1);
  const at::Tensor expected = make();
  torch::manual_seed(1);
  Construction construction;
  at::Tensor made;
  ASSERT_NO_THROW(made = construction.construct(make));
  EXPECT_TRUE(same_bits(made, expected));
}

TEST(Pointers, ToTheModelsTensorsAreNotRead) {
  EXPECT_THAT(refusal([] {
                const at::Tensor tensor = large();
                first_of(tensor);
                return tensor;
              }),
              AllOf(HasSubstr("pointer"), HasSubstr("Float"), HasSubstr("[200, 200]")));
}

TEST(Pointers, ToTensorsThatAreGoneWereNotRead) {
  EXPECT_THAT(refusal([] {
                const at::Tensor tensor = torch::randn({100, 300}, torch::kDouble);
                std::vector<double> values(30000);
                std::memcpy(values.data(), tensor.data_ptr(), tensor.nbytes());
                return torch::tensor(values);
              }),
              AllOf(HasSubstr("pointer"), HasSubstr("Double"), HasSubstr("[100, 300]")));
  EXPECT_THAT(refusal([] {
                const at::Tensor tensor = torch::empty({256, 256});
                tensor.fill_(1);
                return torch::full({256, 256}, tensor.accessor<float, 2>()[255][255]);
              }),
              HasSubstr("[256, 256]"));
  // An operator had yet to compute this value.
  EXPECT_THAT(refusal([] { return torch::full({200}, first_of(large() + 1)); }),
              HasSubstr("pointer"));
  EXPECT_THAT(refusal([] { return torch::full({200}, first_of(large().t().slice(0, 100))); }),
              HasSubstr("pointer"));
}

TEST(Pointers, ToTensorsThatAreGoneWereNotWrittenTo) {
  EXPECT_THAT(refusal([] {
                const at::Tensor tensor = large();
                write_first(tensor, 5);
                return tensor.clone();
              }),
              HasSubstr("pointer"));
}

TEST(Pointers, ToOneByteOfALargeTensorAreNoticed) {
  // One page of 200 MB is used.
  EXPECT_THAT(refusal([] {
                const at::Tensor tensor = torch::ones({50'000'000});
                return torch::full({200, 200}, tensor.data_ptr<float>()[49'999'999]);
              }),
              HasSubstr("[50000000]"));
}

TEST(Pointers, ReadOnAThreadWhereTheTensorGoes) {
  EXPECT_THAT(refusal([] {
                at::Tensor tensor = large();
                float value = 0;
                std::thread([&value, moved = std::move(tensor)]() mutable {
                  value = first_of(moved);
                  moved.reset();
                }).join();
                return torch::full({200, 200}, value);
              }),
              HasSubstr("pointer"));
}

TEST(Pointers, ReadBeforeTheTensorIsPutElsewhere) {
  EXPECT_THAT(refusal([] {
                at::Tensor tensor = large();
                const float value = first_of(tensor);
                tensor.set_data(torch::full({200, 200}, value));
                return tensor;
              }),
              HasSubstr("pointer"));
}

TEST(Pointers, ReadBeforeAnOperatorNeedsTheValues) {
  EXPECT_THAT(refusal([] {
                const at::Tensor tensor = large();
                const float value = first_of(tensor);
                return tensor.div_(tensor[0][0].item()).add_(value);
              }),
              HasSubstr("pointer"));
}

TEST(Pointers, ReadBeforeTheTensorBecomesAnOrdinaryOne) {
  EXPECT_THAT(refusal([] {
                const at::Tensor tensor = large();
                const float value = first_of(tensor);
                return tensor.resize_({300, 300}).fill_(value);
              }),
              HasSubstr("pointer"));
  Construction construction;
  const auto keep = [&] {
    const at::Tensor tensor = large();
    first_of(tensor);
    construction.keep(std::array{tensor});
    return tensor;
  };
  EXPECT_THAT(usage_error([&] { construction.construct(keep); }), HasSubstr("pointer"));
  const auto materialise = [&] {
    const at::Tensor tensor = large();
    first_of(tensor);
    const auto values = construction.materialise(std::array{tensor});
    return tensor;
  };
  EXPECT_THAT(usage_error([&] { construction.construct(materialise); }), HasSubstr("pointer"));
}

TEST(Pointers, ReadBeforeTheTensorIsFilledWithZeros) {
  EXPECT_THAT(refusal([] {
                const at::Tensor tensor = large();
                const float value = first_of(tensor);
                tensor.zero_();
                write_first(tensor, value);
                return tensor;
              }),
              HasSubstr("pointer"));
}

TEST(Pointers, ReadInOneOfTwoConstructorsAtOnce) {
  Construction construction;
  const auto make = [&] {
    const float value = first_of(large());
    std::thread([&] {
      try {
        construction.construct([] { return large(); });
      } catch (const UsageError&) {
        // It is impossible to tell which of the two constructors it was.
      }
    }).join();
    return torch::full({200, 200}, value);
  };
  EXPECT_THAT(usage_error([&] { construction.construct(make); }), HasSubstr("pointer"));
}

TEST(Pointers, MayWriteToWhatIsNewOrAllZeros) {
  const std::map<std::string, std::function<at::Tensor()>> blanks = {
      {"empty",
       [] {
         return torch::empty({200, 200});
       }},
      {"zeros",
       [] {
         return torch::zeros({200, 200});
       }},
      {"zeros_like", [] { return torch::zeros_like(large()); }},
      {"filled",
       [] {
         return torch::full({200, 200}, 0.0F);
       }},
      {"zeroed", [] { return large().zero_(); }},
      {"copied",
       [] {
         return torch::zeros({200, 200}).clone();
       }},
      {"converted",
       [] {
         return torch::zeros({200, 200}, torch::kLong).to(torch::kFloat);
       }},
  };
  for (const auto& [name, blank] : blanks) {
    SCOPED_TRACE(name);
    const auto write = [&blank = blank] {
      const at::Tensor tensor = blank();
      for (int i = 0; i < 40000; ++i) tensor.data_ptr<float>()[i] = static_cast<float>(i);
      return tensor;
    };
    expect_as_ever(write);
    // The tensor is read again, by operators and through the pointer, and then gone.
    expect_as_ever([&] { return write() + 1; });
    expect_as_ever([&] { return torch::full({200, 200}, write().data_ptr<float>()[7]); });
    expect_as_ever([&] { return torch::full({200, 200}, write().norm().item()); });
  }
  // These are zeros to an operator, but not to the bit.
  EXPECT_THAT(refusal([] {
                const at::Tensor tensor = torch::full({200, 200}, -0.0);
                write_first(tensor, 1);
                return tensor;
              }),
              HasSubstr("pointer"));
}

TEST(Pointers, MayReadZeros) {
  expect_as_ever([] {
    const at::Tensor zeros = torch::zeros({200, 200});
    return torch::full({200, 200}, first_of(zeros.clone()) + first_of(zeros.view({-1})));
  });
}

TEST(Pointers, ToWhatIsWrittenMayBeKept) {
  Construction construction;
  const auto tensors = construction.construct([&] {
    std::vector<at::Tensor> zeros = {torch::zeros({200, 200}), torch::zeros({200, 200})};
    for (const at::Tensor& tensor : zeros) write_first(tensor, 5);
    construction.keep(std::array{zeros[0]});
    const auto values = construction.materialise(std::array{zeros[1]});
    return zeros;
  });
  for (const at::Tensor& tensor : tensors) EXPECT_EQ(tensor.sum().item<float>(), 5);
}

TEST(Pointers, ThatNobodyUsesAreNoMistake) {
  expect_as_ever([] {
    large();
    const at::Tensor used = large();
    const float norm = used.norm().item<float>() + (large() + 1).max().item<float>();
    EXPECT_NE(used.data_ptr(), nullptr);
    return torch::full({200, 200}, norm);
  });
}

TEST(Pointers, MayReadWhatIsThere) {
  // resize_() makes the tensor an ordinary one.
  expect_as_ever([] { return torch::full({200, 200}, first_of(large().resize_({300, 300}))); });
  Construction construction;
  const at::Tensor expected = torch::full({200, 200}, 3.0F);
  const at::Tensor made = construction.construct([&] {
    const at::Tensor tensor = torch::full({300, 300}, 3.0F);
    const auto values = construction.materialise(std::array{tensor});
    return torch::full({200, 200}, first_of(tensor));
  });
  EXPECT_TRUE(same_bits(made, expected));
}

TEST(Pointers, UsedOutsideOfAConstructorAreNotItsMistake) {
  torch::manual_seed(1);
  const at::Tensor expected = large();
  Construction construction;
  torch::manual_seed(1);
  const at::Tensor tensor = construction.construct([] { return large(); });
  at::Tensor gone = construction.construct([] { return large(); });
  EXPECT_EQ(first_of(tensor), 0);  // pickle_save would find the same
  std::ostringstream stream;
  EXPECT_THROW(torch::save(tensor, stream), UsageError);
  EXPECT_EQ(first_of(gone), 0);
  gone.reset();
  EXPECT_NO_THROW(construction.construct([] { return large(); }));
  EXPECT_NO_THROW(construction.construct([&] { return tensor + 1; }));
  EXPECT_TRUE(same_bits(tensor, expected));
}

TEST(Pointers, TheNextConstructorIsNotRefusedForTheLast) {
  Construction construction;
  at::Tensor escaped;
  const auto read = [&] {
    escaped = large();
    return first_of(escaped) + first_of(large());
  };
  EXPECT_THROW(construction.construct(read), UsageError);
  EXPECT_NO_THROW(construction.construct(large));
  EXPECT_THROW(construction.construct([&]() -> int {
    read();
    throw std::runtime_error("no");
  }),
               std::runtime_error);
  EXPECT_NO_THROW(construction.construct(large));
}

}  // namespace
}  // namespace lockstep::deferred
