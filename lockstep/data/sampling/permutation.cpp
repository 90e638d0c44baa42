#include <lockstep/data/sampling/permutation.h>

#include <bit>

#include <lockstep/base/error.h>
#include <lockstep/base/hash.h>
#include <lockstep/base/philox.h>

namespace lockstep::data {

namespace {

// Four are enough to look random on halves of many bits; halves of few need more.
constexpr int rounds = 8;
// Smaller networks cannot mix well; 256 values are walked through in no time.
constexpr int least_half_bits = 4;

}  // namespace

Permutation::Permutation(std::int64_t size, std::uint64_t seed, std::int64_t epoch)
    : size_(size),
      // Others draw from the same seed.
      key_(seed ^ hash_text("data::Permutation")),
      epoch_(static_cast<std::uint64_t>(epoch)),
      half_bits_(least_half_bits) {
  constexpr std::int64_t largest = std::int64_t{1} << 62;
  if (size < 0 || size > largest)
    throw UsageError("a permutation of {} places: there can be 0 to {}", size, largest);
  const int bits = size == 0 ? 0 : std::bit_width(static_cast<std::uint64_t>(size - 1));
  while (2 * half_bits_ < bits) ++half_bits_;
}

std::uint64_t Permutation::step(std::uint64_t value) const {
  const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
  std::uint64_t left = value >> half_bits_;
  std::uint64_t right = value & mask;
  for (int round = 0; round < rounds; ++round) {
    const auto words = Philox::words(key_, right | static_cast<std::uint64_t>(round) << 32, epoch_);
    const std::uint64_t mixed = (left ^ words[0]) & mask;
    left = right;
    right = mixed;
  }
  return left << half_bits_ | right;
}

std::int64_t Permutation::operator()(std::int64_t place) const {
  LOCKSTEP_CHECK(place >= 0 && place < size_, "place {} of {}", place, size_);
  auto value = static_cast<std::uint64_t>(place);
  do value = step(value);
  while (value >= static_cast<std::uint64_t>(size_));
  return static_cast<std::int64_t>(value);
}

}  // namespace lockstep::data
