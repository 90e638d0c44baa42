// The error about too little memory says which settings to make smaller.
#include <lockstep/train/preflight/memory_fit.h>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>

namespace lockstep::train {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(OutOfMemory, IsToldFromOtherErrors) {
  EXPECT_TRUE(is_out_of_memory(std::bad_alloc()));
  EXPECT_TRUE(is_out_of_memory(std::runtime_error(
      "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 139.81 GiB total capacity)")));
  // The messages of LibTorch's allocators for the host; each build has one of them.
  for (const char* text :
       {"DefaultCPUAllocator: can't allocate memory: you tried to allocate 5 bytes",
        "DefaultCPUAllocator: not enough memory: you tried to allocate 5 bytes"})
    EXPECT_TRUE(is_out_of_memory(std::runtime_error(text)));
  EXPECT_FALSE(is_out_of_memory(std::runtime_error("the file has no memory of that")));
  EXPECT_FALSE(is_out_of_memory(std::length_error("vector::reserve")));
}

TEST(OutOfMemory, IsWhatLibTorchThrowsAndTheAdviceHasTheNumbers) {
  TrainConfig config;
  config.data.sequence_length = 4096;
  try {
    at::empty({std::int64_t{1} << 58}, at::kByte);
    FAIL() << "this host has 256 PiB of memory";
  } catch (const std::exception& error) {
    EXPECT_TRUE(is_out_of_memory(error)) << error.what();
    const std::string advice = out_of_memory_advice(config, error);
    EXPECT_THAT(advice,
                AllOf(HasSubstr("out of memory: "), HasSubstr("train_micro_batch_size_per_gpu"),
                      HasSubstr("gradient_accumulation_steps"),
                      HasSubstr("data.sequence_length (it is 4096)")));
    EXPECT_THAT(advice, AllOf(HasSubstr("288230376151711744"), Not(HasSubstr("\n"))))
        << "the bytes that were asked for, and no frames";
  }
}

}  // namespace
}  // namespace lockstep::train
