// How many bytes each rank gets, and how many of them go to another node.
#include <cstdint>
#include <numeric>
#include <vector>

#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include <lockstep/comm/quantized.h>

#include "ranks.h"

namespace lockstep::comm::testing {
namespace {

using ::testing::ElementsAre;

class SentBytes : public OverRanks {};

TEST_P(SentBytes, AreThoseOfTheMessagesToEachRank) {
  run_ranks(3, [&](Communicator& group) {
    const auto others = [&](std::uint64_t bytes) {
      std::vector<std::uint64_t> wanted(3, bytes);
      wanted[static_cast<std::size_t>(group.rank())] = 0;
      return wanted;
    };
    EXPECT_EQ(group.sent_bytes(), others(0));
    const at::Tensor part = room(100'000, at::kFloat);
    const at::Tensor whole = room(300'000, at::kFloat);
    group.all_gather(whole, part).wait();
    EXPECT_EQ(group.sent_bytes(), others(400'000));
    group.reduce_scatter(part, whole).wait();
    EXPECT_EQ(group.sent_bytes(), others(800'000));
    // Each part goes to its owner, and the owner sends its result back, in place or as a message.
    group.all_reduce(whole).wait();
    EXPECT_EQ(group.sent_bytes(), others(1'600'000));
    if (group.rank() == 0) group.exchange({send_to(2, part)}).wait();
    if (group.rank() == 2) group.exchange({receive_from(0, part)}).wait();
    if (group.rank() == 0)
      EXPECT_THAT(*group.sent_bytes(), ElementsAre(0, 1'600'000, 2'000'000));
    else
      EXPECT_EQ(group.sent_bytes(), others(1'600'000));
    const auto split = group.split(0, 0, "split");
    split->all_gather(whole, part).wait();
    EXPECT_EQ(split->sent_bytes(), others(400'000));
  });
}

constexpr int kPerNode = 2;

// Bytes to ranks of other nodes; every two ranks are a node.
std::uint64_t crossing(const Communicator& group, const Communicator& world) {
  const auto sent = group.sent_bytes();
  std::uint64_t bytes = 0;
  for (std::size_t rank = 0; rank < sent->size(); ++rank)
    if (group.global_ranks()[rank] / kPerNode != world.rank() / kPerNode) bytes += (*sent)[rank];
  return bytes;
}

// One step of sharded training: parameters are gathered for forward and for backward, gradients are
// reduced and scattered. ZeRO++ gathers quantized weights, keeps them inside the node for backward,
// and reduces quantized gradients in two hops.
TEST_P(SentBytes, AcrossNodesAreAQuarterInZeroPlusPlus) {
  for (const at::ScalarType type : {at::kBFloat16, at::kFloat})
    for (const std::int64_t count : {65'536, 10'007})
      run_ranks(4, [&](Communicator& group) {
        const NodeGroups nodes = split_into_nodes(group, kPerNode);
        const auto so_far = [&] {
          return crossing(group, group) + crossing(*nodes.inside, group) +
                 crossing(*nodes.across, group);
        };
        const at::Tensor shard = place(numbers(count, group.rank(), type));
        const at::Tensor weights = room(4 * count, type);
        const at::Tensor gradients = place(numbers(4 * count, group.rank(), type));
        const at::Tensor gradient = room(count, type);

        const std::uint64_t before = so_far();
        group.all_gather(weights, shard).wait();
        group.all_gather(weights, shard).wait();
        group.reduce_scatter(gradient, gradients).wait();
        const std::uint64_t plain = so_far() - before;
        // Each of the three calls sends to the two ranks of the other node.
        EXPECT_EQ(plain, 3u * 2 * static_cast<std::uint64_t>(count) * c10::elementSize(type));

        QuantizedGather(group, weights, shard).wait();
        const at::Tensor secondary =
            weights.narrow(0, nodes.inside->rank() * 2 * count, 2 * count).clone();
        nodes.inside->all_gather(weights, secondary).wait();
        QuantizedReduceScatter(nodes, gradient, gradients).wait();
        const std::uint64_t quantized = so_far() - before - plain;
        // Weights go to two ranks, gradients to one.
        const auto length = static_cast<std::size_t>(count);
        const BlockFormat int8{QuantizedType::int8};
        const BlockFormat int4{QuantizedType::int4};
        EXPECT_EQ(quantized, 2 * encoded_bytes(length, int8) + encoded_bytes(length, int4));
        const std::size_t scales = sizeof(float) * 3 * num_blocks(length, int8);
        EXPECT_LE(quantized, plain / 4 + scales);
        // The scales are included.
        EXPECT_LT(quantized, plain / 4);
      });
}

INSTANTIATE_TEST_SUITE_P(Over, SentBytes, ::testing::ValuesIn(settings()));

}  // namespace
}  // namespace lockstep::comm::testing
