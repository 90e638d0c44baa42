// Philox for several counters at once, written so that compilers make vector code of it.
#pragma once

#include <cstdint>

#include <lockstep/base/philox.h>

namespace lockstep::nn {

// The words of kLanes consecutive blocks: words[w][i] is word w of block first + i, equal to
// Philox::words(key, first + i, counter_high)[w].
struct PhiloxLanes {
  // g++ unrolls loops of 16 or fewer turns before it vectorizes, and then makes no vector code of
  // them.
  static constexpr int kLanes = 32;
  static constexpr int kWords = 4 * kLanes;

  alignas(64) std::uint32_t words[4][kLanes];

  // Inlined, so that it is compiled for the instruction set of the function that calls it.
  [[gnu::always_inline]] inline void draw(std::uint64_t key, std::uint64_t first,
                                          std::uint64_t counter_high) {
    for (int i = 0; i < kLanes; ++i) {
      const std::uint64_t counter = first + static_cast<std::uint64_t>(i);
      words[0][i] = static_cast<std::uint32_t>(counter);
      words[1][i] = static_cast<std::uint32_t>(counter >> 32);
      words[2][i] = static_cast<std::uint32_t>(counter_high);
      words[3][i] = static_cast<std::uint32_t>(counter_high >> 32);
    }
    auto k0 = static_cast<std::uint32_t>(key);
    auto k1 = static_cast<std::uint32_t>(key >> 32);
    for (int round = 0; round < 10; ++round) {
      for (int i = 0; i < kLanes; ++i) {
        const std::uint64_t p0 = 0xd2511f53ull * words[0][i];
        const std::uint64_t p1 = 0xcd9e8d57ull * words[2][i];
        words[0][i] = static_cast<std::uint32_t>(p1 >> 32) ^ words[1][i] ^ k0;
        words[1][i] = static_cast<std::uint32_t>(p1);
        words[2][i] = static_cast<std::uint32_t>(p0 >> 32) ^ words[3][i] ^ k1;
        words[3][i] = static_cast<std::uint32_t>(p0);
      }
      k0 += 0x9e3779b9u;
      k1 += 0xbb67ae85u;
    }
  }
};

}  // namespace lockstep::nn
