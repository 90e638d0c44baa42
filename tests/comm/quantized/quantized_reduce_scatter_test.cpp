#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include <lockstep/comm/quantized.h>

#include "../../base/errors.h"
#include "ranks.h"

namespace lockstep::comm::testing {
namespace {

using ::testing::HasSubstr;

constexpr BlockFormat kInt4{QuantizedType::int4, 256};

class QuantizedReductions : public OverRanks {};

// The values that a rank has for another one, decoded from their blocks.
at::Tensor term(int from, int to, int num_ranks, std::int64_t count, const BlockFormat& format,
                at::ScalarType type) {
  return through_blocks(numbers(count * num_ranks, from, type).narrow(0, to * count, count),
                        format);
}

at::Tensor summed(const Communicator& group, std::int64_t count, const BlockFormat& format = kInt4,
                  at::ScalarType type = at::kFloat) {
  std::vector<at::Tensor> terms;
  for (int rank = 0; rank < group.size(); ++rank)
    terms.push_back(term(rank, group.rank(), group.size(), count, format, type));
  return tree_sum(terms);
}

// With nodes, the nodes' sums are quantized once more.
at::Tensor summed_over_nodes(const Communicator& group, int per_node, std::int64_t count,
                             const BlockFormat& format = kInt4, at::ScalarType type = at::kFloat) {
  std::vector<at::Tensor> nodes;
  for (int first = 0; first < group.size(); first += per_node) {
    std::vector<at::Tensor> terms;
    for (int rank = first; rank < first + per_node; ++rank)
      terms.push_back(term(rank, group.rank(), group.size(), count, format, type));
    nodes.push_back(through_blocks(tree_sum(terms), format));
  }
  return tree_sum(nodes);
}

TEST_P(QuantizedReductions, AddInTheCanonicalOrder) {
  for (const int num_ranks : {1, 2, 3, 4, 5})
    run_ranks(num_ranks, [&](Communicator& group) {
      for (const BlockFormat& format : kFormats)
        for (const std::int64_t count : kCounts)
          for (const at::ScalarType type : kTypes)
            for (const ReduceOp op : {ReduceOp::sum, ReduceOp::mean}) {
              at::Tensor wanted = summed(group, count, format, type);
              if (op == ReduceOp::mean) wanted = wanted / group.size();
              const at::Tensor output = room(count, type);
              const at::Tensor input = numbers(count * group.size(), group.rank(), type);
              QuantizedReduceScatter(group, output, place(input), {.op = op, .format = format})
                  .wait();
              EXPECT_TRUE(same(output, wanted.to(type))) << count << " " << type;
            }
    });
}

TEST_P(QuantizedReductions, InTwoHopsAddNodesFirst) {
  for (const auto& [num_ranks, per_node] :
       {std::pair(4, 2), std::pair(6, 2), std::pair(6, 3), std::pair(8, 4)})
    run_ranks(num_ranks, [&, per_node = per_node](Communicator& group) {
      const NodeGroups nodes = split_into_nodes(group, per_node);
      for (const BlockFormat& format : kFormats)
        for (const std::int64_t count : {0, 1, 7, 256, 301})
          for (const at::ScalarType type : kTypes) {
            const at::Tensor wanted =
                summed_over_nodes(group, per_node, count, format, type) / group.size();
            const at::Tensor output = room(count, type);
            const at::Tensor input = numbers(count * group.size(), group.rank(), type);
            QuantizedReduceScatter(nodes, output, place(input),
                                   {.op = ReduceOp::mean, .format = format})
                .wait();
            EXPECT_TRUE(same(output, wanted.to(type))) << count << " " << type;
          }
    });
}

TEST_P(QuantizedReductions, NeedNoSecondHopToNowhere) {
  for (const auto& [num_ranks, per_node] :
       {std::pair(1, 1), std::pair(2, 1), std::pair(2, 2), std::pair(3, 3), std::pair(3, 1)})
    run_ranks(num_ranks, [&, per_node = per_node](Communicator& group) {
      const NodeGroups nodes = split_into_nodes(group, per_node);
      const at::Tensor output = room(301, at::kFloat);
      QuantizedReduceScatter(nodes, output, place(numbers(301 * group.size(), group.rank())))
          .wait();
      EXPECT_TRUE(same(output, summed(group, 301)));
    });
}

TEST_P(QuantizedReductions, AreNearTheExactResult) {
  run_ranks(4, [&](Communicator& group) {
    const std::int64_t count = 5000;
    const at::Tensor input = place(numbers(count * 4, group.rank()));
    const at::Tensor exact = room(count, at::kFloat);
    group.reduce_scatter(exact, input).wait();
    const at::Tensor one_hop = room(count, at::kFloat);
    QuantizedReduceScatter(group, one_hop, input).wait();
    const at::Tensor two_hops = room(count, at::kFloat);
    QuantizedReduceScatter(split_into_nodes(group, 2), two_hops, input).wait();
    // Each of four values may be wrong by half of a scale, which is at most 4 / 7; each of the two
    // sums of two by half of a scale twice that size.
    const float half_a_scale = 0.5f * 4 / 7;
    const float one_error = (one_hop - exact).abs().max().item<float>();
    const float two_error = (two_hops - exact).abs().max().item<float>();
    EXPECT_LE(one_error, 4 * half_a_scale + 1e-5f);
    EXPECT_LE(two_error, 4 * half_a_scale + 2 * 2 * half_a_scale * 1.2f);
    EXPECT_GT(one_error, 0);
    EXPECT_GT(two_error, 0);
  });
}

TEST_P(QuantizedReductions, WhatIsNotFiniteReachesTheSum) {
  for (const float bad :
       {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
        std::numeric_limits<float>::quiet_NaN()})
    for (const at::ScalarType type : kTypes)
      run_ranks(4, [&](Communicator& group) {
        const at::Tensor input = numbers(4 * 1000, group.rank(), type);
        if (group.rank() == 1) input[2 * 1000 + 300] = bad;
        const NodeGroups nodes = split_into_nodes(group, 2);
        const at::Tensor one_hop = room(1000, type);
        const at::Tensor two_hops = room(1000, type);
        QuantizedReduceScatter(group, one_hop, place(input)).wait();
        QuantizedReduceScatter(nodes, two_hops, place(input)).wait();
        for (const at::Tensor& output : {one_hop, two_hops}) {
          const at::Tensor nans = at::isnan(output.cpu());
          EXPECT_EQ(nans.sum().item<std::int64_t>(), group.rank() == 2 ? 256 : 0);
          EXPECT_EQ(nans.narrow(0, 256, 256).all().item<bool>(), group.rank() == 2);
        }
      });
}

// As in a backward pass: one reduction starts while others are under way, each of them one hop
// behind.
TEST_P(QuantizedReductions, AreOnTheirWayUntilWaitedFor) {
  for (const Launch launch : {Launch::in_background, Launch::on_wait})
    run_ranks(4, [&](Communicator& group) {
      const NodeGroups nodes = split_into_nodes(group, 2);
      const QuantizedReductionOptions options{.call = {.launch = launch, .subject = 3}};
      const std::vector<std::int64_t> counts = {300, 1, 4099};
      std::vector<at::Tensor> outputs;
      std::vector<QuantizedReduceScatter> reductions;
      for (const std::int64_t count : counts) {
        const at::Tensor input = place(numbers(4 * count, group.rank()));
        outputs.push_back(room(count, at::kFloat));
        reductions.emplace_back(nodes, outputs.back(), input, options);
        input.zero_();  // the input has been read already
        if (reductions.size() > 1) reductions[reductions.size() - 2].start_second_hop();
        EXPECT_TRUE(same(outputs.back(), at::full({count}, 42.0f)));
      }
      for (std::size_t i = 0; i < counts.size(); ++i) {
        reductions[i].wait();
        reductions[i].wait();
        // Comparing waits for the device.
        EXPECT_TRUE(same(outputs[i], summed_over_nodes(group, 2, counts[i])));
        EXPECT_TRUE(reductions[i].done());
      }
    });
}

TEST_P(QuantizedReductions, DivideByWhatAnEarlierCallGives) {
  if (GetParam().device != c10::DeviceType::CPU) GTEST_SKIP() << "the host has no divisor there";
  run_ranks(4, [&](Communicator& group) {
    const NodeGroups nodes = split_into_nodes(group, 2);
    const at::Tensor input = numbers(4 * 500, group.rank());
    // the sum over the ranks is 10
    const at::Tensor divisor = at::full({1}, group.rank() + 1, at::kDouble);
    const at::Tensor one_hop = room(500, at::kFloat);
    const at::Tensor two_hops = room(500, at::kFloat);
    Work counting = group.all_reduce(divisor);
    const QuantizedReductionOptions options{.op = ReduceOp::mean, .call = {.divisor = divisor}};
    QuantizedReduceScatter(group, one_hop, input, options).wait();
    EXPECT_TRUE(same(one_hop, summed(group, 500) / 10));
    counting.wait();
    QuantizedReduceScatter(nodes, two_hops, input, options).wait();
    EXPECT_TRUE(same(two_hops, summed_over_nodes(group, 2, 500) / 10));
  });
}

TEST_P(QuantizedReductions, TakeMemoryWhereTheyAreToldAndGiveItBack) {
  run_ranks(4, [&](Communicator& group) {
    const NodeGroups nodes = split_into_nodes(group, 2);
    std::vector<at::Tensor> taken;
    const TakeMemory take = [&](std::int64_t bytes) {
      taken.push_back(at::empty({bytes}, at::dtype(at::kByte).device(GetParam().device)));
      return taken.back();
    };
    const at::Tensor output = room(300, at::kFloat);
    QuantizedReduceScatter reduction(nodes, output, place(numbers(4 * 300, group.rank())),
                                     {.memory = take});
    ASSERT_EQ(taken.size(), 2u);
    EXPECT_EQ(taken[0].numel(), 4 * static_cast<std::int64_t>(encoded_bytes(300, kInt4)));
    reduction.wait();
    ASSERT_EQ(taken.size(), 3u);
    EXPECT_EQ(taken[2].numel(), 2 * 300 * 4);
    for (const at::Tensor& memory : taken) EXPECT_EQ(memory.storage().use_count(), 1u);
    EXPECT_TRUE(same(output, summed_over_nodes(group, 2, 300)));
  });
}

TEST_P(QuantizedReductions, InAndOutMayShareMemory) {
  run_ranks(3, [&](Communicator& group) {
    const at::Tensor whole = place(numbers(900, group.rank()));
    const at::Tensor own = whole.narrow(0, group.rank() * 300, 300);
    QuantizedReduceScatter(group, own, whole).wait();
    EXPECT_TRUE(same(own, summed(group, 300)));
  });
}

TEST_P(QuantizedReductions, RefuseBeforeAnythingIsSent) {
  run_ranks(2, [&](Communicator& group) {
    const at::Tensor four = room(4, at::kFloat);
    const at::Tensor two = room(2, at::kFloat);
    const auto reduce = [&](const at::Tensor& output, const at::Tensor& input,
                            const QuantizedReductionOptions& options = {}) {
      return usage_error([&] { QuantizedReduceScatter(group, output, input, options); });
    };
    EXPECT_THAT(reduce(four, two), HasSubstr("input of 2 elements and an output of 4"));
    EXPECT_THAT(reduce(two, four, {.op = ReduceOp::max}), HasSubstr("max"));
    EXPECT_THAT(reduce(two, four, {.format = {QuantizedType::int4, 1}}), HasSubstr("blocks of 1"));
    EXPECT_THAT(reduce(two, four, {.call = {.divisor = at::ones({1}, at::kDouble)}}),
                HasSubstr("for means"));
    EXPECT_THAT(reduce(two, four, {.op = ReduceOp::mean, .call = {.divisor = at::ones({1})}}),
                HasSubstr("one float64"));
    EXPECT_THAT(reduce(two, four, {.call = {.algorithm = Algorithm::ring}}), HasSubstr("ring"));
    EXPECT_THAT(usage_error([&] { split_into_nodes(group, 3); }), HasSubstr("nodes of 3 ranks"));
    EXPECT_THAT(usage_error([&] { split_into_nodes(group, 0); }), HasSubstr("divides 2"));
    QuantizedReduceScatter(group, two, four).wait();
  });
}

INSTANTIATE_TEST_SUITE_P(Over, QuantizedReductions, ::testing::ValuesIn(settings()));

}  // namespace
}  // namespace lockstep::comm::testing
