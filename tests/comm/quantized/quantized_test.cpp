// Ranks are threads, connected by shared memory or TCP.
#include <lockstep/comm/quantized.h>

#include <cmath>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/base/philox.h>
#include <lockstep/comm/codecs/block_quantizer.h>
#include <lockstep/comm/scalar_type.h>
#include <lockstep/comm/transport_communicator.h>

#include "../../base/errors.h"

namespace lockstep::comm {
namespace {

using ::testing::HasSubstr;

void run_ranks(int num_ranks, Media media, const std::function<void(Communicator&)>& body) {
  const auto secret = net::Secret::random();
  std::vector<std::shared_ptr<Endpoint>> endpoints;
  std::vector<EndpointAddress> addresses;
  GroupInfo group{.global_ranks = std::vector<int>(static_cast<std::size_t>(num_ranks))};
  std::iota(group.global_ranks.begin(), group.global_ranks.end(), 0);
  for (int rank = 0; rank < num_ranks; ++rank) {
    endpoints.push_back(std::make_shared<Endpoint>("127.0.0.1", secret));
    addresses.push_back(endpoints.back()->address());
  }
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank)
    threads.emplace_back([&, rank, group]() mutable {
      try {
        group.rank = rank;
        const auto communicator = make_transport_communicator(
            endpoints[static_cast<std::size_t>(rank)], group, "quantized-test", addresses,
            {.media = media, .timeout = milliseconds(30000)});
        body(*communicator);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  for (auto& thread : threads) thread.join();
}

// Any rank can tell what another one has.
at::Tensor numbers(std::int64_t count, int rank, at::ScalarType type = at::kFloat) {
  const at::Tensor tensor = at::empty({count}, at::kFloat);
  for (std::int64_t i = 0; i < count; ++i) {
    const auto words =
        Philox::words(static_cast<std::uint64_t>(rank) + 1, static_cast<std::uint64_t>(i));
    tensor.data_ptr<float>()[i] =
        (2 * Philox::uniform(words[0]) - 1) * std::exp2(10 * Philox::uniform(words[1]) - 8);
  }
  return tensor.to(type);
}

// As a tensor comes out of its blocks, as floats.
at::Tensor through_blocks(const at::Tensor& tensor, const BlockFormat& format) {
  const auto count = static_cast<std::size_t>(tensor.numel());
  std::vector<std::byte> message(encoded_bytes(count, format));
  encode_blocks(format, dtype_of(tensor.scalar_type()),
                static_cast<const std::byte*>(tensor.data_ptr()), count, message.data());
  const at::Tensor result = at::empty({tensor.numel()}, at::kFloat);
  decode_blocks(format, DType::float32, message.data(), count,
                static_cast<std::byte*>(result.data_ptr()));
  return result;
}

// The canonical order once more: split at the largest power of two below the count.
at::Tensor tree_sum(const std::vector<at::Tensor>& terms, std::size_t first, std::size_t count) {
  if (count == 1) return terms[first];
  std::size_t left = 1;
  while (left * 2 < count) left *= 2;
  return tree_sum(terms, first, left) + tree_sum(terms, first + left, count - left);
}

constexpr BlockFormat kFormats[] = {{QuantizedType::int8, 256},
                                    {QuantizedType::int4, 256},
                                    {QuantizedType::int8, 10},
                                    {QuantizedType::int4, 10}};
constexpr std::int64_t kCounts[] = {0, 1, 7, 255, 256, 1003};
constexpr at::ScalarType kTypes[] = {at::kFloat, at::kHalf, at::kBFloat16};

class Quantized : public ::testing::TestWithParam<Media> {};

TEST_P(Quantized, AllGatherGivesEveryRankTheSame) {
  for (const int num_ranks : {1, 2, 3, 4})
    run_ranks(num_ranks, GetParam(), [](Communicator& group) {
      for (const BlockFormat& format : kFormats)
        for (const std::int64_t count : kCounts)
          for (const at::ScalarType from : kTypes)
            for (const at::ScalarType to : kTypes) {
              std::vector<at::Tensor> wanted;
              for (int rank = 0; rank < group.size(); ++rank)
                wanted.push_back(through_blocks(numbers(count, rank, from), format).to(to));
              const at::Tensor output = at::full({count * group.size()}, 42, to);
              quantized_all_gather(group, output, numbers(count, group.rank(), from), format);
              EXPECT_TRUE(at::equal(output, at::cat(wanted))) << count;
            }
    });
}

TEST_P(Quantized, ReduceScatterAddsInTheCanonicalOrder) {
  for (const int num_ranks : {1, 2, 3, 4, 5})
    run_ranks(num_ranks, GetParam(), [](Communicator& group) {
      const int self = group.rank();
      for (const BlockFormat& format : kFormats)
        for (const std::int64_t count : kCounts)
          for (const at::ScalarType type : kTypes)
            for (const ReduceOp op : {ReduceOp::sum, ReduceOp::mean}) {
              std::vector<at::Tensor> terms;
              for (int rank = 0; rank < group.size(); ++rank)
                terms.push_back(through_blocks(
                    numbers(count * group.size(), rank, type).narrow(0, self * count, count),
                    format));
              at::Tensor wanted = tree_sum(terms, 0, terms.size());
              if (op == ReduceOp::mean) wanted = wanted / group.size();
              const at::Tensor output = at::full({count}, 42, type);
              quantized_reduce_scatter(group, output, numbers(count * group.size(), self, type),
                                       {.op = op, .format = format});
              EXPECT_TRUE(at::equal(output, wanted.to(type))) << count << " " << type;
            }
    });
}

TEST_P(Quantized, IsNearTheExactResult) {
  run_ranks(4, GetParam(), [](Communicator& group) {
    const std::int64_t count = 5000;
    const at::Tensor input = numbers(count * 4, group.rank());
    const at::Tensor exact = at::empty({count});
    const at::Tensor output = at::empty({count});
    group.reduce_scatter(exact, input).wait();
    quantized_reduce_scatter(group, output, input);
    // Four values, each wrong by up to half of a scale, which is at most 4 / 7.
    EXPECT_LE((output - exact).abs().max().item<float>(), 4 * 0.5f * 4 / 7 + 1e-5f);
    EXPECT_GT((output - exact).abs().max().item<float>(), 0);
  });
}

TEST_P(Quantized, WhatIsNotFiniteReachesTheSum) {
  run_ranks(3, GetParam(), [](Communicator& group) {
    const at::Tensor input = numbers(3 * 1000, group.rank());
    if (group.rank() == 1) input[2 * 1000 + 300] = std::numeric_limits<float>::infinity();
    const at::Tensor output = at::empty({1000});
    quantized_reduce_scatter(group, output, input);
    const auto spoilt = at::isnan(output).sum().item<std::int64_t>();
    EXPECT_EQ(spoilt, group.rank() == 2 ? 256 : 0);
  });
}

TEST_P(Quantized, InAndOutMayShareMemory) {
  run_ranks(3, GetParam(), [](Communicator& group) {
    const std::int64_t count = 300;
    at::Tensor whole = at::zeros({3 * count});
    const at::Tensor own = whole.narrow(0, group.rank() * count, count);
    own.copy_(numbers(count, group.rank()));
    const at::Tensor apart = at::empty_like(whole);
    quantized_all_gather(group, apart, own);
    quantized_all_gather(group, whole, own);
    EXPECT_TRUE(at::equal(whole, apart));
    const at::Tensor sum = at::empty({count});
    quantized_reduce_scatter(group, sum, whole);
    quantized_reduce_scatter(group, own, whole);
    EXPECT_TRUE(at::equal(own, sum));
  });
}

TEST_P(Quantized, RefusesBeforeAnythingIsSent) {
  run_ranks(2, GetParam(), [](Communicator& group) {
    const at::Tensor four = at::ones({4});
    const at::Tensor two = at::ones({2});
    const auto gather = [&](const at::Tensor& output, const at::Tensor& input,
                            BlockFormat format = {}) {
      return usage_error([&] { quantized_all_gather(group, output, input, format); });
    };
    EXPECT_THAT(gather(four, four), HasSubstr("output of 4 elements and an input of 4: 2 times 4"));
    EXPECT_THAT(gather(four, at::Tensor()), HasSubstr("undefined"));
    EXPECT_THAT(gather(four, two.to(at::kDouble)), HasSubstr("Double"));
    EXPECT_THAT(gather(at::ones({2, 4}).t(), at::ones({4})), HasSubstr("not contiguous"));
    EXPECT_THAT(gather(four, at::ones({2}, at::kMeta)), HasSubstr("meta"));
    EXPECT_THAT(gather(four, two, {QuantizedType::int8, 3}), HasSubstr("blocks of 3"));
    EXPECT_THAT(usage_error([&] { quantized_reduce_scatter(group, four, two); }),
                HasSubstr("input of 2 elements and an output of 4"));
    EXPECT_THAT(
        usage_error([&] { quantized_reduce_scatter(group, two, four, {.op = ReduceOp::max}); }),
        HasSubstr("max"));
    quantized_all_gather(group, four, two);
  });
}

INSTANTIATE_TEST_SUITE_P(Over, Quantized, ::testing::Values(Media::shared_memory, Media::tcp));

}  // namespace
}  // namespace lockstep::comm
