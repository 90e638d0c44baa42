// Random numbers that depend on where they are used, not on numbers drawn before: Philox 4x32-10
// (Salmon et al., 2011). The same (key, counter) gives the same four words on every machine.
#pragma once

#include <array>
#include <cstdint>

namespace lockstep {

struct Philox {
  using Words = std::array<std::uint32_t, 4>;

  // Four random words for a 64-bit key and a 128-bit counter, low half first.
  static constexpr Words words(std::uint64_t key, std::uint64_t counter_low,
                               std::uint64_t counter_high = 0) {
    Words c = {
        static_cast<std::uint32_t>(counter_low), static_cast<std::uint32_t>(counter_low >> 32),
        static_cast<std::uint32_t>(counter_high), static_cast<std::uint32_t>(counter_high >> 32)};
    auto k0 = static_cast<std::uint32_t>(key);
    auto k1 = static_cast<std::uint32_t>(key >> 32);
    for (int round = 0; round < 10; ++round) {
      const std::uint64_t p0 = 0xd2511f53ull * c[0];
      const std::uint64_t p1 = 0xcd9e8d57ull * c[2];
      c = {static_cast<std::uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<std::uint32_t>(p1),
           static_cast<std::uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<std::uint32_t>(p0)};
      k0 += 0x9e3779b9u;
      k1 += 0xbb67ae85u;
    }
    return c;
  }

  // A number in [0, 1) with 24 random bits, which a float holds exactly.
  static constexpr float uniform(std::uint32_t word) {
    return static_cast<float>(word >> 8) * 0x1p-24f;
  }
};

}  // namespace lockstep
