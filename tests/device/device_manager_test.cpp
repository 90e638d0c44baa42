#include <lockstep/device/device_manager.h>

#include <cstdlib>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/base/error.h>
#include <lockstep/device/cuda.h>

namespace lockstep::device {
namespace {

using testing::HasSubstr;

// Tests that need a GPU skip themselves if there is none; this one fails then if ./dev test gpu
// needs it.
TEST(Gpu, IsThereWhereItIsNeeded) {
  if (std::getenv("LOCKSTEP_TEST_NEEDS_GPU") == nullptr) GTEST_SKIP() << "nobody needs one";
  EXPECT_TRUE(at::hasCUDA() && at::ones({2}, at::kCUDA).sum().item<float>() == 2.0f);
}

TEST(PeakFlops, OfThoseThatAreKnown) {
  EXPECT_EQ(peak_flops("NVIDIA H200", at::kBFloat16), 989.4e12);
  EXPECT_EQ(peak_flops("NVIDIA H100 80GB HBM3", at::kHalf), 989.4e12);
  EXPECT_EQ(peak_flops("NVIDIA H100 PCIe", at::kBFloat16), 756e12);
  EXPECT_EQ(peak_flops("NVIDIA A100-SXM4-40GB", at::kFloat), 19.5e12);
  EXPECT_EQ(peak_flops("NVIDIA L40S", at::kBFloat16), 362e12);
  EXPECT_EQ(peak_flops("NVIDIA H200", at::kDouble), std::nullopt);
  EXPECT_EQ(peak_flops("AMD EPYC 7B13", at::kBFloat16), std::nullopt);
}

TEST(PickGpu, OneEach) {
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(pick_gpu(rank, 4, 8, GpuUse::one_rank_each), rank);
}

TEST(PickGpu, MoreRanksThanGpusIsAnErrorOnEveryRank) {
  for (int rank = 0; rank < 4; ++rank) {
    try {
      pick_gpu(rank, 4, 2, GpuUse::one_rank_each);
      FAIL();
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr("4 ranks on this host want a GPU each"));
      EXPECT_THAT(error.what(), HasSubstr("sees 2"));
      EXPECT_THAT(error.what(), HasSubstr("--nproc-per-node 2"));
      EXPECT_THAT(error.what(), HasSubstr("GpuUse::shared"));
    }
  }
}

TEST(PickGpu, SharedDealsInTurn) {
  EXPECT_EQ(pick_gpu(0, 3, 2, GpuUse::shared), 0);
  EXPECT_EQ(pick_gpu(1, 3, 2, GpuUse::shared), 1);
  EXPECT_EQ(pick_gpu(2, 3, 2, GpuUse::shared), 0);
}

TEST(PickGpu, BadNumbers) {
  EXPECT_THROW(pick_gpu(0, 1, 0, GpuUse::shared), UsageError);
  EXPECT_THROW(pick_gpu(-1, 1, 1, GpuUse::shared), UsageError);
  EXPECT_THROW(pick_gpu(1, 1, 1, GpuUse::shared), UsageError);
}

TEST(DeviceManager, TheBestDeviceIsTaken) {
  const auto manager = DeviceManager::auto_detect({.local_rank = 0, .local_world_size = 1});
  EXPECT_EQ(manager.device().is_cuda(), num_gpus() > 0);
  EXPECT_EQ(manager.device().is_cpu(), num_gpus() == 0 && !at::hasMPS());
  const at::Tensor there = at::ones({3}, at::TensorOptions().device(manager.device()));
  EXPECT_EQ(there.sum().item<float>(), 3);
}

TEST(DeviceManager, AKindCanBeAskedFor) {
  const auto cpu = DeviceManager::auto_detect({.type = c10::DeviceType::CPU});
  EXPECT_TRUE(cpu.device().is_cpu());
  EXPECT_EQ(cpu.num_devices(), 0);
  try {
    DeviceManager::auto_detect({.type = c10::DeviceType::XLA});
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("no device of kind 'xla'"));
  }
  if (num_gpus() == 0) {
    EXPECT_THROW(DeviceManager::auto_detect({.type = c10::DeviceType::CUDA}), UsageError);
  }
}

class EachDevice : public testing::TestWithParam<c10::DeviceType> {
 protected:
  void SetUp() override {
    if (GetParam() == c10::DeviceType::CUDA && num_gpus() == 0) GTEST_SKIP() << "no GPU";
  }
  DeviceManager manager() const {
    return DeviceManager::auto_detect({.local_rank = 0, .local_world_size = 1, .type = GetParam()});
  }
};

TEST_P(EachDevice, SaysWhatItIs) {
  const auto manager = this->manager();
  EXPECT_FALSE(manager.name().empty());
  EXPECT_GE(manager.num_cores(), 1);
  EXPECT_GT(manager.memory().total_bytes, 0u);
  EXPECT_LE(manager.memory().free_bytes, manager.memory().total_bytes);
  if (const auto busy = manager.utilisation(std::chrono::milliseconds(50))) {
    EXPECT_GE(*busy, 0);
    EXPECT_LE(*busy, 1);
  }
  std::printf("%s: %s, %d cores, %.1f of %.1f GiB free\n", manager.device().str().c_str(),
              manager.name().c_str(), manager.num_cores(),
              static_cast<double>(manager.memory().free_bytes) / (1 << 30),
              static_cast<double>(manager.memory().total_bytes) / (1 << 30));
}

// Whatever the answer is, it has a reason, and yes means that the product works.
TEST_P(EachDevice, AnswersAboutFormatsAreProbed) {
  const auto manager = this->manager();
  const at::Tensor state = at::detail::getDefaultCPUGenerator().get_state();
  const int threads = at::get_num_threads();
  for (const Support* support : {&manager.supports_bf16(), &manager.supports_fp8()}) {
    EXPECT_FALSE(support->reason.empty());
    EXPECT_EQ(support->reason.find('\n'), std::string::npos);
    EXPECT_EQ(static_cast<bool>(*support), support->yes);
    std::printf("%s: %s\n", support->yes ? "yes" : "no", support->reason.c_str());
  }
  EXPECT_TRUE(at::equal(state, at::detail::getDefaultCPUGenerator().get_state()))
      << "the user's random numbers must not depend on a probe";
  EXPECT_EQ(at::get_num_threads(), threads);
  // The answer is kept, and shared with copies.
  const DeviceManager copy = manager;
  EXPECT_EQ(&manager.supports_bf16(), &copy.supports_bf16());
  if (manager.supports_bf16()) {
    const auto options = at::TensorOptions().device(manager.device()).dtype(at::kBFloat16);
    EXPECT_EQ(at::mm(at::ones({8, 8}, options), at::ones({8, 8}, options))[0][0].item<float>(), 8);
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, EachDevice,
                         testing::Values(c10::DeviceType::CPU, c10::DeviceType::CUDA));

}  // namespace
}  // namespace lockstep::device
