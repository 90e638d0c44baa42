#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include <lockstep/base/hash.h>

namespace lockstep {
namespace {

TEST(HashText, IsTheSameEverywhereAndTellsTextsApart) {
  // These values must never change: ids made of them travel between hosts and versions.
  EXPECT_EQ(hash_text(""), 0xfdbdf6ac4fc52e7full);
  EXPECT_EQ(hash_text("world"), 0x40d105adb1528efaull);
  std::vector<std::uint64_t> seen;
  for (int i = 0; i < 10000; ++i) seen.push_back(hash_text("group " + std::to_string(i)));
  std::sort(seen.begin(), seen.end());
  EXPECT_EQ(std::adjacent_find(seen.begin(), seen.end()), seen.end());
}

TEST(HashMemory, ChangesWithEveryBitAndTheLength) {
  for (std::size_t size = 0; size < 150; ++size) {
    std::vector<std::byte> memory(size, std::byte{0x5a});
    const std::uint64_t hash = hash_memory(memory);
    for (std::size_t bit = 0; bit < 8 * size; ++bit) {
      memory[bit / 8] ^= std::byte(1u << bit % 8);
      EXPECT_NE(hash_memory(memory), hash) << "bit " << bit << " of " << size << " bytes";
      memory[bit / 8] ^= std::byte(1u << bit % 8);
    }
    memory.push_back(std::byte{0});
    EXPECT_NE(hash_memory(memory), hash) << "one more byte than " << size;
  }
}

// This happens when a float64 parameter is negated on one rank.
TEST(HashMemory, ChangesWithTheHighestBitsOfSeveralWords) {
  std::vector<std::byte> memory(1024, std::byte{0x5a});
  const std::uint64_t hash = hash_memory(memory);
  const auto flip_sign = [&memory](std::size_t word) { memory[8 * word + 7] ^= std::byte{0x80}; };
  for (std::size_t other = 1; other < memory.size() / 8; ++other) {
    flip_sign(0);
    flip_sign(other);
    EXPECT_NE(hash_memory(memory), hash) << "words 0 and " << other;
    flip_sign(0);
    flip_sign(other);
  }
  for (std::size_t word = 0; word < memory.size() / 8; ++word) flip_sign(word);
  EXPECT_NE(hash_memory(memory), hash);
}

}  // namespace
}  // namespace lockstep
