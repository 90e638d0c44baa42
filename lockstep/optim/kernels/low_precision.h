// Numbers of 16 bits as an optimizer meets them: to floats and back, over plain memory. Each
// element is computed by itself, with the same bits wherever a range is cut.
#pragma once

#include <cstdint>

#include <lockstep/base/float16.h>

namespace lockstep::optim {

// How a float becomes a number of 16 bits.
enum class Rounding : std::uint8_t {
  nearest,     // to even: a step that is small beside its weight changes nothing
  stochastic,  // up or down at random, so that the expected value is the float
};

// The random bits of a tensor's elements follow from these numbers alone.
struct RandomBits {
  std::uint64_t key = 0;  // the run and the tensor
  std::uint64_t step = 0;
  std::int64_t first = 0;  // the first element's place in the whole tensor
};

void widen(const BFloat16* from, std::int64_t count, float* to);
void widen(const Float16* from, std::int64_t count, float* to);

// To the nearest.
void narrow(const float* from, std::int64_t count, BFloat16* to);
void narrow(const float* from, std::int64_t count, Float16* to);
// Stochastically. Infinities and NaNs stay what they are.
void narrow(const float* from, std::int64_t count, BFloat16* to, const RandomBits& random);
void narrow(const float* from, std::int64_t count, Float16* to, const RandomBits& random);

void scale(float* values, std::int64_t count, float factor);

// Elements that share one call of Philox, which gives each 16 bits.
inline constexpr std::int64_t kElementsOfADraw = 8;

}  // namespace lockstep::optim
