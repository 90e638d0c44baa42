// Ranks as threads of this process, over shared memory or TCP, with tensors on the CPU or all on
// one GPU; and their expected results, computed on the CPU.
#pragma once

#include <functional>
#include <ostream>
#include <vector>

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <lockstep/comm/codecs/block_format.h>
#include <lockstep/comm/communicator.h>
#include <lockstep/comm/transport/connect.h>

namespace lockstep::comm::testing {

struct Setting {
  Media media = Media::shared_memory;
  c10::DeviceType device = c10::DeviceType::CPU;
};
void PrintTo(const Setting& setting, std::ostream* out);
std::vector<Setting> settings();

// Skipped if there is no GPU for it.
class OverRanks : public ::testing::TestWithParam<Setting> {
 protected:
  void SetUp() override;

  void run_ranks(int num_ranks, const std::function<void(Communicator&)>& body) const;
  // Copies a tensor to the device under test.
  at::Tensor place(const at::Tensor& host) const;
  // A tensor there, filled with a value that is no result.
  at::Tensor room(std::int64_t count, at::ScalarType type) const;
};

constexpr BlockFormat kFormats[] = {{QuantizedType::int8, 256},
                                    {QuantizedType::int4, 256},
                                    {QuantizedType::int8, 10},
                                    {QuantizedType::int4, 10}};
constexpr std::int64_t kCounts[] = {0, 1, 7, 255, 256, 1003};
constexpr at::ScalarType kTypes[] = {at::ScalarType::Float, at::ScalarType::Half,
                                     at::ScalarType::BFloat16};

// Numbers that any rank can compute for any other.
at::Tensor numbers(std::int64_t count, int rank, at::ScalarType type = at::ScalarType::Float);

// The tensor after encoding to blocks and decoding, as floats.
at::Tensor through_blocks(const at::Tensor& tensor, const BlockFormat& format);

// The sum in the canonical order.
at::Tensor tree_sum(const std::vector<at::Tensor>& terms);

// Compares bit for bit, on any device; a nan equals any nan.
bool same(const at::Tensor& got, const at::Tensor& wanted);

}  // namespace lockstep::comm::testing
