#include <lockstep/optim/round_with_operators.h>

#include <algorithm>
#include <array>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

namespace lockstep::optim {

namespace {

constexpr std::int64_t kLow = 0xffffffff;                // the low half of 64 bits
constexpr std::int64_t kAtOnce = std::int64_t{1} << 20;  // elements, which take some 200 bytes each

at::Tensor high_half(const at::Tensor& words) {
  return at::bitwise_right_shift(words, 32).bitwise_and_(kLow);
}

// The 16 random bits of each element from a multiple of kElementsOfADraw on, as Long: Philox as
// base/philox.h has it, on tensors of 32-bit words that lie in 64 bits.
at::Tensor random_bits(const RandomBits& random, std::int64_t first, std::int64_t count,
                       const at::TensorOptions& options) {
  const std::int64_t draws = (count + kElementsOfADraw - 1) / kElementsOfADraw;
  const std::int64_t draw = first / kElementsOfADraw;
  const at::Tensor counter = at::arange(draw, draw + draws, options.dtype(at::kLong));
  const auto word = [&](std::uint64_t value, int half) {
    return at::full_like(counter, static_cast<std::int64_t>(value >> (32 * half)) & kLow);
  };
  std::array<at::Tensor, 4> c = {counter.bitwise_and(kLow), high_half(counter),
                                 word(random.step, 0), word(random.step, 1)};
  auto k0 = static_cast<std::uint32_t>(random.key);
  auto k1 = static_cast<std::uint32_t>(random.key >> 32);
  for (int round = 0; round < 10; ++round) {
    // The lowest 64 bits of a product are the same with and without signs.
    const at::Tensor p0 = c[0] * std::int64_t{0xd2511f53};
    const at::Tensor p1 = c[2] * std::int64_t{0xcd9e8d57};
    c = {high_half(p1).bitwise_xor_(c[1]).bitwise_xor_(static_cast<std::int64_t>(k0)),
         p1.bitwise_and(kLow),
         high_half(p0).bitwise_xor_(c[3]).bitwise_xor_(static_cast<std::int64_t>(k1)),
         p0.bitwise_and(kLow)};
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  std::vector<at::Tensor> halves;
  for (const at::Tensor& words : c) {
    halves.push_back(words.bitwise_and(0xffff));
    halves.push_back(at::bitwise_right_shift(words, 16));
  }
  return at::stack(halves, 1).view({-1}).narrow(0, 0, count);
}

at::Tensor rounded_to_bfloat16(const at::Tensor& bits, const at::Tensor& random) {
  return at::bitwise_right_shift(bits + random, 16);
}

// As kernels/low_precision.cpp.
at::Tensor rounded_to_half(const at::Tensor& bits, const at::Tensor& random) {
  constexpr std::int64_t kExponent = 0x7f800000;
  const at::Tensor magnitude = bits.bitwise_and(0x7fffffff).clamp_max(kExponent - 1);
  const at::Tensor exponent = magnitude.bitwise_and(kExponent).clamp_min(std::int64_t{113} << 23);
  const auto as_float = [](const at::Tensor& of) { return of.to(at::kInt).view(at::kFloat); };
  const at::Tensor units = as_float(magnitude) / as_float(exponent - (std::int64_t{10} << 23));
  const at::Tensor below = at::bitwise_right_shift(random, 3).to(at::kFloat).mul_(0x1p-13);
  const at::Tensor rounded = (at::bitwise_right_shift(exponent, 13) - (std::int64_t{113} << 10) +
                              (units + below).to(at::kLong))
                                 .clamp_max(0x7c00);
  return at::bitwise_right_shift(bits, 16).bitwise_and_(0x8000).bitwise_or_(rounded);
}

}  // namespace

void round_with_operators(const at::Tensor& values, const at::Tensor& to, Rounding rounding,
                          const RandomBits& random) {
  const c10::NoGradGuard no_grad;
  if (rounding == Rounding::nearest) {
    to.copy_(values);
    return;
  }
  const at::Tensor from = values.contiguous().view({-1});
  const at::Tensor result = at::empty({from.numel()}, to.options());
  const std::int64_t before = random.first % kElementsOfADraw;
  for (std::int64_t begin = 0; begin < from.numel();) {
    // A piece ends where a draw does.
    const std::int64_t end =
        std::min(begin + kAtOnce - (begin + before) % kElementsOfADraw, from.numel());
    const at::Tensor piece = from.narrow(0, begin, end - begin);
    const std::int64_t skipped = (begin + before) % kElementsOfADraw;
    const at::Tensor bits16 =
        random_bits(random, random.first + begin - skipped, end - begin + skipped, piece.options())
            .narrow(0, skipped, end - begin);
    const at::Tensor bits = piece.view(at::kInt).to(at::kLong).bitwise_and_(kLow);
    const at::Tensor rounded = to.scalar_type() == at::kHalf ? rounded_to_half(bits, bits16)
                                                             : rounded_to_bfloat16(bits, bits16);
    const at::Tensor numbers = rounded.to(at::kShort).view(to.scalar_type());
    result.narrow(0, begin, end - begin)
        .copy_(at::where(piece.isfinite(), numbers, piece.to(to.scalar_type())));
    begin = end;
  }
  to.copy_(result.view(to.sizes()));
}

}  // namespace lockstep::optim
