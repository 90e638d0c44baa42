#include "ranks.h"

#include <cmath>
#include <exception>
#include <memory>
#include <numeric>
#include <span>
#include <thread>

#include <ATen/ATen.h>

#include <lockstep/base/philox.h>
#include <lockstep/comm/backends/native/transport_communicator.h>
#include <lockstep/comm/call.h>
#include <lockstep/comm/codecs/block_quantizer.h>
#include <lockstep/device/cuda.h>

namespace lockstep::comm::testing {

namespace {

at::Tensor tree_sum_of(std::span<const at::Tensor> terms) {
  if (terms.size() == 1) return terms.front();
  std::size_t left = 1;
  while (left * 2 < terms.size()) left *= 2;
  return tree_sum_of(terms.first(left)) + tree_sum_of(terms.subspan(left));
}

}  // namespace

void PrintTo(const Setting& setting, std::ostream* out) {
  *out << (setting.media == Media::tcp ? "tcp" : "shm") << " with tensors on "
       << c10::DeviceTypeName(setting.device, /*lower_case=*/true);
}

std::vector<Setting> settings() {
  return {{Media::shared_memory, c10::DeviceType::CPU},
          {Media::tcp, c10::DeviceType::CPU},
          {Media::shared_memory, c10::DeviceType::CUDA}};
}

void OverRanks::SetUp() {
  if (GetParam().device == c10::DeviceType::CUDA && device::num_gpus() == 0)
    GTEST_SKIP() << "there is no GPU";
}

void OverRanks::run_ranks(int num_ranks, const std::function<void(Communicator&)>& body) const {
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
        const auto communicator = backends::make_transport_communicator(
            endpoints[static_cast<std::size_t>(rank)], group, "quantized-test", addresses,
            {.media = GetParam().media, .timeout = milliseconds(30000)});
        body(*communicator);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  for (auto& thread : threads) thread.join();
}

at::Tensor OverRanks::place(const at::Tensor& host) const { return host.to(GetParam().device); }

at::Tensor OverRanks::room(std::int64_t count, at::ScalarType type) const {
  return at::full({count}, 42, at::dtype(type).device(GetParam().device));
}

at::Tensor numbers(std::int64_t count, int rank, at::ScalarType type) {
  const at::Tensor tensor = at::empty({count}, at::kFloat);
  for (std::int64_t i = 0; i < count; ++i) {
    const auto words =
        Philox::words(static_cast<std::uint64_t>(rank) + 1, static_cast<std::uint64_t>(i));
    tensor.data_ptr<float>()[i] =
        (2 * Philox::uniform(words[0]) - 1) * std::exp2(10 * Philox::uniform(words[1]) - 8);
  }
  return tensor.to(type);
}

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

at::Tensor tree_sum(const std::vector<at::Tensor>& terms) { return tree_sum_of(terms); }

bool same(const at::Tensor& got, const at::Tensor& wanted) {
  const at::Tensor a = got.cpu();
  const at::Tensor b = wanted.cpu();
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  if (!at::isFloatingType(a.scalar_type())) return at::equal(a, b);
  const at::Tensor nans = at::isnan(a);
  // Zeros of different signs compare as equal but are not: their quotients differ.
  const at::Tensor signs = at::signbit(a).eq(at::signbit(b)).logical_or(nans);
  return at::equal(nans, at::isnan(b)) && a.eq(b).logical_or(nans).all().item<bool>() &&
         signs.all().item<bool>();
}

}  // namespace lockstep::comm::testing
