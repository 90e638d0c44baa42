#include <lockstep/nn/kernels/cpu/random_kernels.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include <lockstep/base/simd.h>
#include <lockstep/nn/kernels/cpu/philox_lanes.h>

namespace lockstep::nn {

namespace {

// The next two functions consist of additions, multiplications and divisions in a fixed order,
// which IEEE arithmetic rounds alike everywhere. A library's log or sine differs by machine and by
// vector width.

// ln x of a positive normal number, to about 1e-16: x = m·2^e with m near 1, and
// ln m = 2 artanh((m-1)/(m+1)).
[[gnu::always_inline]] inline double natural_log(double x) {
  constexpr std::uint64_t kRootHalf = 0x3fe6a09e667f3bcdull;  // the bits of sqrt(1/2)
  const auto bits = std::bit_cast<std::uint64_t>(x);
  const auto exponent =
      static_cast<std::int32_t>(static_cast<std::int64_t>(bits - kRootHalf) >> 52);
  const auto m =
      std::bit_cast<double>(bits - (static_cast<std::uint64_t>(std::int64_t{exponent}) << 52));
  const double s = (m - 1.0) / (m + 1.0);
  const double z = s * s;
  double p = 1.0 / 21;
  p = p * z + 1.0 / 19;
  p = p * z + 1.0 / 17;
  p = p * z + 1.0 / 15;
  p = p * z + 1.0 / 13;
  p = p * z + 1.0 / 11;
  p = p * z + 1.0 / 9;
  p = p * z + 1.0 / 7;
  p = p * z + 1.0 / 5;
  p = p * z + 1.0 / 3;
  p = p * z + 1.0;
  return static_cast<double>(exponent) * 0x1.62e42fefa39efp-1 + 2.0 * s * p;
}

struct Turn {
  double cosine;
  double sine;
};

// The sine and cosine of turn/2^32 of a full turn. The angle is reduced exactly, in integers, to at
// most an eighth of a turn, where the Taylor series converges fast.
[[gnu::always_inline]] inline Turn cosine_and_sine(std::uint32_t turn) {
  // 0 to 3: it wraps around as the turn does
  const std::uint32_t quarter = (turn + (1u << 29)) >> 30;
  const auto rest = static_cast<std::int32_t>(turn - (quarter << 30));
  const double x = static_cast<double>(rest) * 0x1.921fb54442d18p-30;  // 2π/2^32
  const double z = x * x;
  double s = 1.0 / 1307674368000;  // 15!
  s = s * -z + 1.0 / 6227020800;
  s = s * -z + 1.0 / 39916800;
  s = s * -z + 1.0 / 362880;
  s = s * -z + 1.0 / 5040;
  s = s * -z + 1.0 / 120;
  s = s * -z + 1.0 / 6;
  s = (s * -z + 1.0) * x;
  double c = 1.0 / 20922789888000;  // 16!
  c = c * -z + 1.0 / 87178291200;
  c = c * -z + 1.0 / 479001600;
  c = c * -z + 1.0 / 3628800;
  c = c * -z + 1.0 / 40320;
  c = c * -z + 1.0 / 720;
  c = c * -z + 1.0 / 24;
  c = c * -z + 1.0 / 2;
  c = c * -z + 1.0;
  const bool swapped = (quarter & 1) != 0;
  const double cosine = swapped ? s : c;
  const double sine = swapped ? c : s;
  return {quarter == 1 || quarter == 2 ? -cosine : cosine, quarter >= 2 ? -sine : sine};
}

// Elements 4·first to 4·(first + lanes) of the stream, by the Box-Muller method: each pair of words
// is a radius and an angle.
LOCKSTEP_SIMD void normal_blocks(std::uint64_t key, std::uint64_t first, double std, float* out) {
  PhiloxLanes lanes;
  lanes.draw(key, first, 0);
  alignas(64) float values[4][PhiloxLanes::kLanes];
  for (int pair = 0; pair < 4; pair += 2)
    for (int i = 0; i < PhiloxLanes::kLanes; ++i) {
      const double u = (static_cast<double>(lanes.words[pair][i]) + 0.5) * 0x1p-32;
      const double radius = std::sqrt(-2.0 * natural_log(u)) * std;
      const Turn turn = cosine_and_sine(lanes.words[pair + 1][i]);
      values[pair][i] = static_cast<float>(radius * turn.cosine);
      values[pair + 1][i] = static_cast<float>(radius * turn.sine);
    }
  for (int i = 0; i < PhiloxLanes::kLanes; ++i)
    for (int word = 0; word < 4; ++word) out[4 * i + word] = values[word][i];
}

// Elements 4·first to 4·(first + lanes) of one sample's mask.
LOCKSTEP_SIMD void mask_blocks(std::uint64_t key, std::uint64_t row, std::uint64_t first,
                               std::uint32_t threshold, float kept, float* out) {
  PhiloxLanes lanes;
  lanes.draw(key, first, row);
  for (int i = 0; i < PhiloxLanes::kLanes; ++i)
    for (int word = 0; word < 4; ++word)
      out[4 * i + word] = lanes.words[word][i] < threshold ? 0.0f : kept;
}

}  // namespace

void normals_of_stream(std::uint64_t key, std::uint64_t offset, std::int64_t count, double std,
                       float* out) {
  while (count > 0) {
    const auto skipped = static_cast<std::int64_t>(offset % 4);
    if (skipped == 0 && count >= PhiloxLanes::kWords) {
      normal_blocks(key, offset / 4, std, out);
      out += PhiloxLanes::kWords;
      offset += PhiloxLanes::kWords;
      count -= PhiloxLanes::kWords;
      continue;
    }
    float values[PhiloxLanes::kWords];
    normal_blocks(key, offset / 4, std, values);
    const std::int64_t taken = std::min(count, PhiloxLanes::kWords - skipped);
    std::copy_n(values + skipped, taken, out);
    out += taken;
    offset += static_cast<std::uint64_t>(taken);
    count -= taken;
  }
}

void mask_of_sample(std::uint64_t key, std::uint64_t row, std::int64_t first, std::int64_t count,
                    std::uint32_t threshold, float kept, float* out) {
  while (count > 0) {
    const auto skipped = first % 4;
    if (skipped == 0 && count >= PhiloxLanes::kWords) {
      mask_blocks(key, row, static_cast<std::uint64_t>(first) / 4, threshold, kept, out);
      out += PhiloxLanes::kWords;
      first += PhiloxLanes::kWords;
      count -= PhiloxLanes::kWords;
      continue;
    }
    float values[PhiloxLanes::kWords];
    mask_blocks(key, row, static_cast<std::uint64_t>(first) / 4, threshold, kept, values);
    // The first elements, up to the next whole block or to the end.
    const auto taken = skipped == 0 ? count : std::min<std::int64_t>(count, 4 - skipped);
    std::copy_n(values + skipped, taken, out);
    out += taken;
    first += taken;
    count -= taken;
  }
}

}  // namespace lockstep::nn
