// The memory that a deferred model takes: by our own count, by LibTorch's allocator, and by the
// pages that the system reports.
#include <malloc.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/utils.h>

#include <lockstep/deferred/construction.h>
#include <lockstep/device/live_bytes.h>

#include "same_bits.h"

namespace lockstep::deferred {
namespace {

using testing::same_bits;

constexpr std::size_t kMegabyte = 1'000'000;

std::size_t bytes_of(const std::vector<at::Tensor>& tensors) {
  std::size_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += tensor.nbytes();
  return bytes;
}

// 10 units of 20 MB, and buffers of 2 MB.
struct TenUnits : torch::nn::Module {
  TenUnits() {
    for (int i = 0; i < 10; ++i) {
      units.push_back(register_module(
          "unit" + std::to_string(i),
          torch::nn::Sequential(torch::nn::Linear(1500, 1000),
                                torch::nn::LayerNorm(torch::nn::LayerNormOptions({1000})),
                                torch::nn::Linear(1000, 3500))));
    }
    buffer = register_buffer("buffer", torch::randn({500, 1000}));
    unregistered = torch::randn({500, 1000});
  }

  std::vector<torch::nn::Sequential> units;
  at::Tensor buffer, unregistered;
};

// Does what a sharding engine does with a unit: keeps an eighth of each parameter, which owns that
// memory from now on.
void shard(const std::vector<at::Tensor>& parameters) {
  const torch::NoGradGuard no_grad;
  for (at::Tensor parameter : parameters)
    parameter.set_data(parameter.detach().view({-1}).slice(0, 0, parameter.numel() / 8).clone());
}

TEST(DeferredMemory, NoMoreThanTheLargestUnitAndWhatIsKept) {
  torch::manual_seed(1);
  const TenUnits plain;
  torch::manual_seed(1);

  const device::LiveBytes allocations(at::kCPU);
  Construction construction;
  const auto model = construction.construct([] { return std::make_shared<TenUnits>(); });
  const std::size_t all = bytes_of(model->parameters());
  ASSERT_GT(all, 200 * kMegabyte);
  EXPECT_EQ(construction.peak_bytes(), 0);
  // This memory is for biases and norms, which are made as usual, and for measuring random
  // operators.
  EXPECT_LT(allocations.peak(), kMegabyte);

  std::size_t largest = 0;
  for (auto& unit : model->units) {
    const auto parameters = unit->parameters();
    largest = std::max(largest, bytes_of(parameters));
    const auto values = construction.materialise(parameters);
    shard(parameters);
  }
  EXPECT_EQ(construction.bytes(), 0);
  EXPECT_LE(construction.peak_bytes(), largest);
  EXPECT_LT(allocations.peak(), all / 8 + kMegabyte);

  construction.keep(model->buffers());
  EXPECT_EQ(construction.bytes(), bytes_of(model->buffers()));
  construction.keep_all();
  EXPECT_EQ(construction.bytes(), bytes_of({model->buffer, model->unregistered}));
  EXPECT_LE(construction.peak_bytes(), largest);

  EXPECT_TRUE(same_bits(model->buffer, plain.buffer));
  EXPECT_TRUE(same_bits(model->unregistered, plain.unregistered));
  const auto expected = plain.units[9]->parameters();
  shard(expected);
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_TRUE(same_bits(model->units[9]->parameters()[i], expected[i]));
}

// The number of pages that are in memory.
std::size_t num_resident_pages(const void* address, std::size_t bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> resident((bytes + page - 1) / page);
  EXPECT_EQ(mincore(const_cast<void*>(address), bytes, resident.data()), 0);
  return std::ranges::count_if(resident, [](unsigned char byte) { return (byte & 1) != 0; });
}

TEST(DeferredMemory, IsGivenBackToTheSystemWhereItLies) {
  Construction construction;
  const at::Tensor tensor = construction.construct([] { return torch::randn({1000, 1000}); });
  const void* const address = tensor.data_ptr();
  const auto resident = [&] { return num_resident_pages(address, tensor.nbytes()); };
  EXPECT_EQ(resident(), 0);
  for (int i = 0; i < 2; ++i) {
    {
      const auto values = construction.materialise(std::array{tensor});
      const auto again = construction.materialise(std::array{tensor, tensor.t()});
      EXPECT_GT(resident(), 0);
      EXPECT_EQ(construction.bytes(), tensor.nbytes());
    }
    EXPECT_EQ(resident(), 0);
    EXPECT_EQ(tensor.data_ptr(), address);
  }
  tensor.sum().item();
  EXPECT_EQ(resident(), 0);
  construction.keep_all();
  EXPECT_GT(resident(), 0);
}

TEST(DeferredMemory, OfTensorsThatAreGoneIsGone) {
  Construction construction;
  at::Tensor tensor = construction.construct([] { return torch::randn({1000, 1000}); });
  construction.keep(std::array{tensor});
  EXPECT_EQ(construction.bytes(), tensor.nbytes());
  tensor.reset();
  EXPECT_EQ(construction.bytes(), 0);
}

TEST(DeferredMemory, WhatIsOnTheWayGoesWhenItIsUsed) {
  Construction construction;
  const at::Tensor tensor = construction.construct([] {
    const at::Tensor first = torch::randn({1000, 1000}) * 0.02;
    return first.add(1).mul(2).sub(3);  // each of these is a tensor of its own
  });
  const auto values = construction.materialise(std::array{tensor});
  EXPECT_EQ(construction.bytes(), tensor.nbytes());
  // The tensor's own memory was taken before; beside it there are an operator's argument and
  // result, and never those of two operators.
  EXPECT_LE(construction.peak_bytes(), 3 * tensor.nbytes());
}

TEST(DeferredMemory, ValuesReadByTheConstructorAreGivenBack) {
  Construction construction;
  const auto tensors = construction.construct([] {
    std::vector<at::Tensor> scaled;
    for (int i = 0; i < 5; ++i) {
      scaled.push_back(torch::randn({500, 1000}));
      scaled.back().div_(scaled.back().norm().item());
    }
    return scaled;
  });
  EXPECT_EQ(construction.bytes(), 0);
  EXPECT_LE(construction.peak_bytes(), 2 * tensors[0].nbytes());
}

// While this lives, the process gets no new addresses; memory that it frees on the heap it can get
// again.
class NoMoreAddresses {
 public:
  explicit NoMoreAddresses(std::size_t heap_bytes) {
    mallopt(M_MMAP_THRESHOLD, 1 << 30);
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    std::free(std::malloc(heap_bytes));
    getrlimit(RLIMIT_AS, &before_);
    std::size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    rlimit now = before_;
    now.rlim_cur = pages * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    setrlimit(RLIMIT_AS, &now);
  }
  ~NoMoreAddresses() { setrlimit(RLIMIT_AS, &before_); }

 private:
  rlimit before_{};
};

TEST(DeferredMemory, WithoutAddressesConstructionIsPlainAndSaysSoOnce) {
  const auto make = [] {
    return std::pair(torch::randn({300, 1000}), torch::randn({300, 1000}) * 2);
  };
  torch::manual_seed(1);
  const auto expected = make();
  torch::manual_seed(1);
  Construction construction;
  std::pair<at::Tensor, at::Tensor> made;
  ::testing::internal::CaptureStderr();
  {
    const NoMoreAddresses none(50 * kMegabyte);
    made = construction.construct(make);
  }
  const std::string said = ::testing::internal::GetCapturedStderr();
  const auto first = said.find("no addresses");
  EXPECT_NE(first, std::string::npos) << said;
  EXPECT_EQ(said.find("no addresses", first + 1), std::string::npos) << said;
  EXPECT_FALSE(construction.is_deferred(made.first));
  EXPECT_TRUE(same_bits(made.first, expected.first));
  EXPECT_TRUE(same_bits(made.second, expected.second));
}

}  // namespace
}  // namespace lockstep::deferred
