#include <gtest/gtest.h>

#include <vector>

#include <ATen/ATen.h>

#include <lockstep/device/live_bytes.h>
#include <lockstep/recompute/recompute.h>

namespace lockstep {
namespace {

constexpr std::int64_t kBlocks = 16;
constexpr std::int64_t kWide = 32 * 2048 * 4;  // in bytes
constexpr std::int64_t kNarrow = 32 * 8 * 4;

// Narrow at its ends and wide in the middle, where five tensors are saved.
struct WideBlock {
  at::Tensor in = at::randn({8, 2048}).requires_grad_();
  at::Tensor out = at::randn({2048, 8}).requires_grad_();

  at::Tensor operator()(const at::Tensor& x) const {
    return x + x.mm(in).sin().cos().sin().cos().mm(out);
  }
};

struct Memory {
  std::int64_t after_forward;
  std::int64_t peak;
  std::int64_t after_backward;
};

template <typename Forward>
Memory memory_of(const Forward& forward) {
  const std::vector<WideBlock> blocks(kBlocks);
  const auto x = at::randn({32, 8});
  // An earlier pass has made the gradients, as in a training.
  forward(blocks, x).sum().backward();
  Memory found{};
  const device::LiveBytes memory(at::kCPU);
  {
    const auto loss = forward(blocks, x).sum();
    found.after_forward = memory.now();
    loss.backward();
    found.peak = memory.peak();
  }
  found.after_backward = memory.now();
  return found;
}

Memory plain() {
  return memory_of([](const std::vector<WideBlock>& blocks, at::Tensor x) {
    for (const auto& block : blocks) x = block(x);
    return x;
  });
}

TEST(RecomputeMemory, IsThatOfOneBlock) {
  const auto expected = plain();
  EXPECT_GT(expected.after_forward, kBlocks * 5 * kWide);
  const auto found = memory_of([](const std::vector<WideBlock>& blocks, at::Tensor x) {
    for (const auto& block : blocks) x = recompute(block, x);
    return x;
  });
  // The blocks' inputs and the states of the random number generator stay.
  EXPECT_LT(found.after_forward, kBlocks * (2 * kNarrow + 8192));
  EXPECT_LT(found.peak * (kBlocks / 2), expected.peak);
  EXPECT_EQ(expected.after_backward, 0);
  EXPECT_EQ(found.after_backward, 0);
}

// The outer function keeps none of the inner functions' inputs.
TEST(RecomputeMemory, IsSavedByTheOuterOfNestedFunctions) {
  const auto found = memory_of([](const std::vector<WideBlock>& blocks, at::Tensor x) {
    for (std::int64_t first = 0; first < kBlocks; first += 4)
      x = recompute(
          [&blocks, first](at::Tensor x) {
            for (std::int64_t i = first; i < first + 4; ++i)
              x = recompute(blocks[static_cast<std::size_t>(i)], x);
            return x;
          },
          x);
    return x;
  });
  EXPECT_LT(found.after_forward, plain().after_forward / (2 * kBlocks));
  EXPECT_LT(found.peak * (kBlocks / 2), plain().peak);
  EXPECT_EQ(found.after_backward, 0);
}

// A pass that needs only some of the recomputed tensors frees the others at its end.
TEST(RecomputeMemory, IsNotKeptByAPassThatNeedsAPart) {
  const WideBlock first, second;
  const auto x = at::randn({32, 8});
  const device::LiveBytes memory(at::kCPU);
  const auto y = recompute(
      [&](const at::Tensor& x) {
        return std::vector<at::Tensor>{first(x), second(x)};
      },
      x);
  const auto before = memory.now();
  y[0].sum().backward();
  // Only the gradients of the first block's weights are new, which take half of that.
  EXPECT_LT(memory.now(), before + kWide);
  y[1].sum().backward();
  EXPECT_TRUE(second.in.grad().defined());
}

}  // namespace
}  // namespace lockstep
