#include <lockstep/deferred/mersenne_twister.h>

#include <array>
#include <cstddef>

namespace lockstep::deferred {

namespace {

// Matsumoto's and Nishimura's MT19937: a state of this many words gives as many numbers, and is
// then turned into the next.
constexpr std::size_t kWords = 624;
constexpr std::size_t kDistance = 397;

std::uint32_t combine(std::uint32_t high, std::uint32_t low) {
  const std::uint32_t mixed = (high & 0x80000000u) | (low & 0x7fffffffu);
  return (mixed >> 1) ^ ((0u - (low & 1u)) & 0x9908b0dfu);
}

// In three loops, none of which reads what it wrote less than 227 words ago: the compiler can
// compute several words at once.
void next_block(std::array<std::uint32_t, kWords>& words) {
  constexpr std::size_t kRest = kWords - kDistance;
  for (std::size_t i = 0; i < kRest; ++i)
    words[i] = words[i + kDistance] ^ combine(words[i], words[i + 1]);
  for (std::size_t i = kRest; i < kWords - 1; ++i)
    words[i] = words[i - kRest] ^ combine(words[i], words[i + 1]);
  words[kWords - 1] = words[kDistance - 1] ^ combine(words[kWords - 1], words[0]);
}

bool same(const TwisterState& a, const TwisterState& b) {
  return a.next_ == b.next_ && a.left_ == b.left_ && a.state_ == b.state_;
}

}  // namespace

void skip(TwisterState& state, std::uint64_t draws) {
  // `left_` counts one more than is left of the block.
  const auto left = static_cast<std::uint64_t>(state.left_ - 1);
  if (draws <= left) {
    state.left_ -= static_cast<int>(draws);
    state.next_ += static_cast<std::uint32_t>(draws);
    return;
  }
  draws -= left;
  for (; draws > kWords; draws -= kWords) next_block(state.state_);
  next_block(state.state_);
  state.left_ = static_cast<int>(kWords - draws + 1);
  state.next_ = static_cast<std::uint32_t>(draws);
}

std::optional<std::uint64_t> draws_between(const TwisterState& from, const TwisterState& to,
                                           std::uint64_t most) {
  TwisterState state = from;
  std::uint64_t draws = 0;
  // Only every 624th number of draws leads to the same place in a block.
  const std::uint64_t first = (to.next_ + kWords - from.next_) % kWords;
  for (std::uint64_t step = first; draws + step <= most; step = kWords) {
    skip(state, step);
    draws += step;
    if (same(state, to)) return draws;
  }
  return std::nullopt;
}

}  // namespace lockstep::deferred
