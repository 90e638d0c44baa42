// Compares our kernels with LibTorch's own, forward and backward, on the shapes of a 6-layer,
// 384-wide GPT with 4 x 256 tokens: milliseconds of a layer (of the whole head for cross-entropy).
// It takes the best of several runs in turns, so that other work on the machine counts as little as
// possible.
//
//   OMP_NUM_THREADS=1 build/release/bench/kernels_lockstep [runs]
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <lockstep/nn/layers/activations.h>
#include <lockstep/nn/layers/attention.h>
#include <lockstep/nn/layers/cross_entropy.h>

namespace {

namespace nn = lockstep::nn;

using Tensors = std::vector<at::Tensor>;
using Computation = std::function<at::Tensor(const Tensors&)>;

struct Milliseconds {
  double forward = std::numeric_limits<double>::infinity();
  double backward = std::numeric_limits<double>::infinity();
};

void run(const Computation& computation, const Tensors& inputs, Milliseconds& best) {
  using Clock = std::chrono::steady_clock;
  const auto milliseconds = [](auto from, auto to) {
    return std::chrono::duration<double, std::milli>(to - from).count();
  };
  const auto begin = Clock::now();
  const auto result = computation(inputs);
  const auto middle = Clock::now();
  torch::autograd::grad({result}, inputs, {at::ones_like(result)});
  const auto end = Clock::now();
  best.forward = std::min(best.forward, milliseconds(begin, middle));
  best.backward = std::min(best.backward, milliseconds(middle, end));
}

void compare(const char* what, int runs, const Tensors& inputs, const Computation& ours,
             const Computation& theirs) {
  Tensors leaves;
  for (const auto& input : inputs) leaves.push_back(input.detach().requires_grad_());
  Milliseconds our_best, their_best;
  for (int i = 0; i < runs; ++i) {
    run(ours, leaves, our_best);
    run(theirs, leaves, their_best);
  }
  const double our_sum = our_best.forward + our_best.backward;
  const double their_sum = their_best.forward + their_best.backward;
  std::printf("%-34s %8.2f + %8.2f   %8.2f + %8.2f   %5.2f x\n", what, our_best.forward,
              our_best.backward, their_best.forward, their_best.backward, their_sum / our_sum);
  std::fflush(stdout);
}

Tensors heads_of(const at::Tensor& projection) {
  Tensors parts;
  for (const auto& part : projection.chunk(3, 2))
    parts.push_back(part.view({4, -1, 6, 64}).transpose(1, 2));
  return parts;
}

at::Tensor plain_attention(const Tensors& parts, const at::Tensor& mask) {
  auto scores = at::matmul(parts[0], parts[1].transpose(2, 3)) / std::sqrt(64.0);
  scores = scores.masked_fill(mask, -std::numeric_limits<float>::infinity());
  return at::matmul(scores.softmax(-1), parts[2]);
}

at::Tensor merged(const at::Tensor& heads) {
  return heads.transpose(1, 2).reshape({heads.size(0), heads.size(2), -1});
}

}  // namespace

int main(int argc, char** argv) {
  const int runs = argc > 1 ? std::atoi(argv[1]) : 20;
  std::printf("%-34s %19s   %19s   %7s\n", "ms, forward + backward", "Lockstep", "LibTorch",
              "faster");
  const auto wide = at::randn({4, 256, 1536});
  compare(
      "GELU tanh 4x256x1536", runs, {wide},
      [](const Tensors& in) { return nn::gelu(in[0], nn::GeluKind::tanh); },
      [](const Tensors& in) { return at::gelu(in[0], "tanh"); });
  compare(
      "GELU erf 4x256x1536", runs, {wide},
      [](const Tensors& in) { return nn::gelu(in[0], nn::GeluKind::erf); },
      [](const Tensors& in) { return at::gelu(in[0]); });
  compare(
      "silu(gate)*up 4x256x1024", runs, {at::randn({4, 256, 1024}), at::randn({4, 256, 1024})},
      [](const Tensors& in) { return nn::silu_multiply(in[0], in[1]); },
      [](const Tensors& in) { return at::silu(in[0]) * in[1]; });
  for (const std::int64_t length : {256, 1024}) {
    const auto mask = at::ones({length, length}, at::kBool).triu(1);
    const auto name = "attention 4x" + std::to_string(length) + ", 6 heads of 64";
    compare(
        name.c_str(), length > 256 ? std::max(1, runs / 4) : runs,
        {at::randn({4, length, 3 * 384})},
        [](const Tensors& in) {
          const auto parts = heads_of(in[0]);
          return merged(nn::attention(parts[0], parts[1], parts[2]));
        },
        [&](const Tensors& in) { return merged(plain_attention(heads_of(in[0]), mask)); });
  }
  for (const std::int64_t vocabulary : {256, 50257}) {
    const auto targets = at::randint(vocabulary, {1024}, at::TensorOptions(at::kLong));
    const int times = vocabulary > 1000 ? std::max(1, runs / 10) : runs;
    const auto name = " 1024x" + std::to_string(vocabulary);
    compare(("cross-entropy" + name).c_str(), times, {at::randn({1024, vocabulary})},
            [&](const Tensors& in) { return nn::cross_entropy(in[0], targets).sum; },
            [&](const Tensors& in) {
              return at::cross_entropy_loss(in[0], targets, {}, at::Reduction::Sum);
            });
    compare(("linear cross-entropy" + name).c_str(), times,
            {at::randn({1024, 384}), at::randn({vocabulary, 384}) * 0.02},
            [&](const Tensors& in) { return nn::linear_cross_entropy(in[0], in[1], targets).sum; },
            [&](const Tensors& in) {
              return at::cross_entropy_loss(at::linear(in[0], in[1]), targets, {},
                                            at::Reduction::Sum);
            });
  }
}
