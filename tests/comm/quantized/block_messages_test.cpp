// Compares the codec on CUDA with the codec on the CPU, bit for bit, and tests the arguments of
// both.
#include <lockstep/comm/quantized.h>

#include <limits>
#include <vector>

#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include <lockstep/device/cuda.h>

#include "../../base/errors.h"
#include "ranks.h"

namespace lockstep::comm::testing {
namespace {

using ::testing::HasSubstr;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::size_t size(std::int64_t number) { return static_cast<std::size_t>(number); }

at::Tensor messages(std::size_t number, std::size_t count, const BlockFormat& format,
                    c10::DeviceType device) {
  // The message must be written completely, so it starts with other bytes.
  return at::full(
      {static_cast<std::int64_t>(number), static_cast<std::int64_t>(encoded_bytes(count, format))},
      0xa5, at::dtype(at::kByte).device(device));
}

at::Tensor encoded(const BlockFormat& format, const at::Tensor& values, const PartTable& table) {
  const at::Tensor result =
      messages(table.num_parts(), table.count, format, values.device().type());
  encode_parts(format, values, table, result);
  return result;
}

at::Tensor decoded(const BlockFormat& format, const at::Tensor& from, const SumTable& table,
                   float divisor, at::ScalarType type) {
  const at::Tensor result = at::full({static_cast<std::int64_t>(table.parts * table.count)}, 42,
                                     at::dtype(type).device(from.device()));
  decode_sums(format, from, table, divisor, result);
  return result;
}

// Values that are hard to get right, with plain numbers around them.
at::Tensor awkward_numbers(std::int64_t count, at::ScalarType type) {
  const at::Tensor values = numbers(count, 5);
  const std::vector<float> awkward = {0,         -0.0f, std::numeric_limits<float>::denorm_min(),
                                      0x1p-127f, 1e30f, std::numeric_limits<float>::max(),
                                      0.5f,      1.5f,  -2.5f,
                                      65504,     1e-7f, std::numeric_limits<float>::lowest()};
  for (std::int64_t i = 0; i < count; i += 3) values[i] = awkward[size(i) / 3 % awkward.size()];
  const float largest = type == at::kHalf       ? 65504.0f
                        : type == at::kBFloat16 ? 0x1.fep127f
                                                : std::numeric_limits<float>::max();
  values.clamp_(-largest, largest);
  if (count > 600) {
    values[300] = kNaN;
    values[601] = -kInfinity;
  }
  return values.to(type);
}

TEST(BlockMessages, TablesAreReadByRowsAndWrittenByColumns) {
  const BlockFormat format{QuantizedType::int8, 4};
  // part p contains only the number p
  const at::Tensor values = at::arange(6).repeat_interleave(5).to(at::kFloat);
  const at::Tensor result = encoded(format, values, {.rows = 2, .columns = 3, .count = 5});
  for (std::int64_t row = 0; row < 2; ++row)
    for (std::int64_t column = 0; column < 3; ++column) {
      const at::Tensor message = result.narrow(0, column * 2 + row, 1);
      EXPECT_TRUE(
          same(decoded(format, message, {.count = 5}, 1, at::kFloat),
               through_blocks(at::full({5}, static_cast<float>(3 * row + column)), format)));
    }
  // Three terms of two parts each.
  const at::Tensor sums =
      decoded(format, result, {.terms = 3, .parts = 2, .count = 5}, 3, at::kFloat);
  EXPECT_LE((sums - at::tensor({1.0f, 4.0f}).repeat_interleave(5)).abs().max().item<float>(),
            1e-6f);
}

TEST(BlockMessages, OnCudaHaveTheBitsOfTheCpu) {
  if (device::num_gpus() == 0) GTEST_SKIP() << "there is no GPU";
  std::vector<std::int64_t> counts = {0, 1, 2, 3, 31, 63, 64, 65, 255, 256, 257, 1003, 100'003};
  for (const QuantizedType type : {QuantizedType::int8, QuantizedType::int4})
    for (const std::size_t block : {2, 10, 64, 256, 1000})
      for (const std::int64_t count : counts)
        for (const at::ScalarType from : kTypes) {
          const BlockFormat format{type, block};
          const PartTable table{.rows = 2, .columns = 3, .count = size(count)};
          for (const at::Tensor& values :
               {numbers(6 * count, 1, from), awkward_numbers(6 * count, from)}) {
            const at::Tensor here = encoded(format, values, table);
            const at::Tensor there = encoded(format, values.cuda(), table);
            ASSERT_TRUE(same(there, here)) << count << " " << from << " in blocks of " << block;
            for (const std::size_t terms : {1, 2, 3, 6})
              for (const at::ScalarType to : kTypes) {
                const SumTable sums{.terms = terms, .parts = 6 / terms, .count = size(count)};
                const float divisor = terms == 3 ? 3 : 1;
                ASSERT_TRUE(same(decoded(format, there, sums, divisor, to),
                                 decoded(format, here, sums, divisor, to)))
                    << terms << " terms of " << count << " to " << to << " in blocks of " << block;
              }
          }
        }
}

TEST(BlockMessages, OnCudaAddManyInTheCanonicalOrder) {
  if (device::num_gpus() == 0) GTEST_SKIP() << "there is no GPU";
  const BlockFormat format{QuantizedType::int4, 64};
  for (const std::size_t terms : {5, 7, 8, 13, 64, 65, 1000}) {
    const at::Tensor values = numbers(static_cast<std::int64_t>(terms) * 99, 3);
    const at::Tensor here = encoded(format, values, {.columns = terms, .count = 99});
    const SumTable sums{.terms = terms, .count = 99};
    EXPECT_TRUE(same(decoded(format, here.cuda(), sums, 1, at::kFloat),
                     decoded(format, here, sums, 1, at::kFloat)))
        << terms;
  }
}

TEST(BlockMessages, NeedADeviceThatTheyCanBeMadeOn) {
  EXPECT_THAT(usage_error([] { check_quantizes_on(at::kMeta); }), HasSubstr("meta"));
  check_quantizes_on(at::kCPU);
  if (device::num_gpus() > 0) check_quantizes_on(at::kCUDA);
}

}  // namespace
}  // namespace lockstep::comm::testing
