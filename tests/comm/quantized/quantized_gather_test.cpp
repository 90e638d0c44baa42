#include <limits>
#include <optional>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>

#include <lockstep/comm/quantized.h>

#include "../../base/errors.h"
#include "ranks.h"

namespace lockstep::comm::testing {
namespace {

using ::testing::HasSubstr;

class QuantizedGathers : public OverRanks {};

// The expected result: all ranks' inputs of `count` numbers, gathered.
at::Tensor gathered(const Communicator& group, std::int64_t count, const BlockFormat& format,
                    at::ScalarType from = at::kFloat, at::ScalarType to = at::kFloat) {
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < group.size(); ++rank)
    parts.push_back(through_blocks(numbers(count, rank, from), format).to(to));
  return at::cat(parts);
}

TEST_P(QuantizedGathers, GiveEveryRankTheSame) {
  for (const int num_ranks : {1, 2, 3, 4})
    run_ranks(num_ranks, [&](Communicator& group) {
      for (const BlockFormat& format : kFormats)
        for (const std::int64_t count : kCounts)
          for (const at::ScalarType from : kTypes)
            for (const at::ScalarType to : kTypes) {
              const at::Tensor output = room(count * group.size(), to);
              QuantizedGather(group, output, place(numbers(count, group.rank(), from)),
                              {.format = format})
                  .wait();
              EXPECT_TRUE(same(output, gathered(group, count, format, from, to))) << count;
            }
    });
}

TEST_P(QuantizedGathers, WhatIsNotFiniteSpoilsItsBlockForAll) {
  for (const at::ScalarType type : kTypes)
    for (const float bad :
         {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
          std::numeric_limits<float>::quiet_NaN()})
      run_ranks(3, [&](Communicator& group) {
        const at::Tensor input = numbers(1000, group.rank(), type);
        if (group.rank() == 1) input[300] = bad;
        const at::Tensor output = room(3000, type);
        QuantizedGather(group, output, place(input)).wait();
        const at::Tensor nans = at::isnan(output.cpu());
        EXPECT_EQ(nans.sum().item<std::int64_t>(), 256);
        EXPECT_TRUE(nans.narrow(0, 1000 + 256, 256).all().item<bool>());
      });
}

// Like prefetching: several gathers are under way beside other calls of the group, and are waited
// for in any order.
TEST_P(QuantizedGathers, AreOnTheirWayUntilWaitedFor) {
  for (const Launch launch : {Launch::in_background, Launch::on_wait})
    run_ranks(3, [&](Communicator& group) {
      const QuantizedGatherOptions options{.call = {.launch = launch, .subject = 7}};
      const at::Tensor first = room(3 * 500, at::kFloat);
      const at::Tensor second = room(3 * 33, at::kBFloat16);
      const at::Tensor input = place(numbers(500, group.rank()));
      QuantizedGather one(group, first, input, options);
      input.zero_();  // the input has been read already
      std::optional<QuantizedGather> two;
      two.emplace(group, second, place(numbers(33, group.rank())), options);
      const at::Tensor ones = room(4, at::kFloat).fill_(1);
      Work other = group.all_reduce(ones);
      EXPECT_TRUE(same(first, at::full({3 * 500}, 42.0f)));
      two->wait();
      two->wait();
      QuantizedGather moved = std::move(one);
      moved.wait();
      one.wait();  // NOLINT(bugprone-use-after-move): nothing is left to wait for
      other.wait();
      EXPECT_TRUE(same(ones, at::full({4}, 3.0f)));
      EXPECT_TRUE(same(first, gathered(group, 500, {})));
      EXPECT_TRUE(moved.done());  // on a device this is true when the results can be read
      EXPECT_TRUE(same(second, gathered(group, 33, {}, at::kFloat, at::kBFloat16)));
    });
}

// Much work on one stream makes the input; the output is read on another.
TEST_P(QuantizedGathers, FollowTheCurrentStream) {
  if (GetParam().device == c10::DeviceType::CPU) GTEST_SKIP() << "there are no streams";
  run_ranks(2, [&](Communicator& group) {
    const at::Tensor output = room(2 * 5000, at::kFloat);
    const c10::impl::VirtualGuardImpl device(GetParam().device);
    device.synchronizeStream(device.getStream(output.device()));
    std::optional<QuantizedGather> gather;
    {
      const c10::StreamGuard guard(device.getStreamFromGlobalPool(output.device()));
      at::Tensor slow = at::ones({2048, 2048}, output.options());
      for (int i = 0; i < 50; ++i) slow = slow.matmul(slow).tanh();
      const at::Tensor input = place(numbers(5000, group.rank())) + (slow.view(-1)[0] - 1);
      gather.emplace(group, output, input);
    }
    const c10::StreamGuard guard(device.getStreamFromGlobalPool(output.device()));
    gather->wait();
    EXPECT_TRUE(same(output.clone(), gathered(group, 5000, {})));
  });
}

TEST_P(QuantizedGathers, MayBeDropped) {
  run_ranks(2, [&](Communicator& group) {
    const at::Tensor output = room(600, at::kFloat);
    { const QuantizedGather dropped(group, output, place(numbers(300, group.rank()))); }
    const at::Tensor next = room(600, at::kFloat);
    QuantizedGather(group, next, place(numbers(300, group.rank()))).wait();
    EXPECT_TRUE(same(next, gathered(group, 300, {})));
    EXPECT_TRUE(same(output, at::full({600}, 42.0f)));
  });
}

TEST_P(QuantizedGathers, TakeMemoryWhereTheyAreToldAndGiveItBack) {
  run_ranks(3, [&](Communicator& group) {
    at::Tensor memory;
    const TakeMemory take = [&](std::int64_t bytes) {
      EXPECT_FALSE(memory.defined());
      memory = at::empty({bytes}, at::dtype(at::kByte).device(GetParam().device));
      return memory;
    };
    const at::Tensor output = room(900, at::kFloat);
    QuantizedGather gather(group, output, place(numbers(300, group.rank())), {.memory = take});
    ASSERT_TRUE(memory.defined());
    EXPECT_EQ(memory.numel(), 3 * static_cast<std::int64_t>(encoded_bytes(300, {})));
    EXPECT_GT(memory.storage().use_count(), 1u);
    gather.wait();
    EXPECT_EQ(memory.storage().use_count(), 1u);
    EXPECT_TRUE(same(output, gathered(group, 300, {})));
    const auto wrong = usage_error([&] {
      QuantizedGather(group, output, place(numbers(300, group.rank())),
                      {.memory = [&](auto bytes) { return at::empty({bytes - 1}, at::kByte); }});
    });
    EXPECT_THAT(wrong, HasSubstr("924 Byte"));
    EXPECT_THAT(wrong, HasSubstr("has given 923 Byte on cpu"));
  });
}

TEST_P(QuantizedGathers, InAndOutMayShareMemory) {
  run_ranks(3, [&](Communicator& group) {
    const at::Tensor whole = room(900, at::kFloat);
    const at::Tensor own = whole.narrow(0, group.rank() * 300, 300);
    own.copy_(numbers(300, group.rank()));
    QuantizedGather(group, whole, own).wait();
    EXPECT_TRUE(same(whole, gathered(group, 300, {})));
  });
}

TEST_P(QuantizedGathers, RefuseBeforeAnythingIsSent) {
  run_ranks(2, [&](Communicator& group) {
    const at::Tensor four = room(4, at::kFloat);
    const at::Tensor two = room(2, at::kFloat);
    const auto gather = [&](const at::Tensor& output, const at::Tensor& input,
                            BlockFormat format = {}) {
      return usage_error([&] { QuantizedGather(group, output, input, {.format = format}); });
    };
    EXPECT_THAT(gather(four, four), HasSubstr("output of 4 elements and an input of 4: 2 times 4"));
    EXPECT_THAT(gather(four, at::Tensor()), HasSubstr("undefined"));
    EXPECT_THAT(gather(four, two.to(at::kDouble)), HasSubstr("Double"));
    EXPECT_THAT(gather(room(8, at::kFloat).view({2, 4}).t(), four), HasSubstr("not contiguous"));
    EXPECT_THAT(gather(four, at::ones({2}, at::kMeta)), HasSubstr("meta"));
    EXPECT_THAT(gather(four, two, {QuantizedType::int8, 3}), HasSubstr("blocks of 3"));
    if (!four.device().is_cpu()) {
      EXPECT_THAT(gather(four, two.cpu()), HasSubstr("one device is needed"));
    }
    QuantizedGather(group, four, two).wait();
  });
}

TEST_P(QuantizedGathers, OfDifferentSubjectsAreNotOneCall) {
  run_ranks(2, [&](Communicator& group) {
    const at::Tensor output = room(20, at::kFloat);
    const auto [fault, text] = comm_error([&] {
      QuantizedGather(group, output, room(10, at::kFloat), {.call = {.subject = group.rank()}})
          .wait();
    });
    EXPECT_EQ(fault, Fault::mismatch) << text;
    EXPECT_THAT(text, HasSubstr("all_gather"));
  });
}

INSTANTIATE_TEST_SUITE_P(Over, QuantizedGathers, ::testing::ValuesIn(settings()));

}  // namespace
}  // namespace lockstep::comm::testing
