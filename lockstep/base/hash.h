// Hashes and checksums for names, memory and messages. None of them protects against an adversary.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

namespace lockstep {

// A 64-bit hash of a text, the same on every machine and in every version.
constexpr std::uint64_t hash_text(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325ull;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  // FNV leaves the high bits of short texts poor; one round of mixing spreads them.
  hash ^= hash >> 32;
  hash *= 0xd6e8feb86659fd93ull;
  return hash ^ (hash >> 32);
}

// A 64-bit hash of memory, the same on every machine of one byte order, at about the speed at which
// memory is read. Any change of one 8-byte word changes it.
inline std::uint64_t hash_memory(std::span<const std::byte> memory) {
  constexpr std::uint64_t kFactor = 0x9e3779b97f4a7c15ull;  // odd, so that no bit is lost
  constexpr int kTurn = 29;
  constexpr std::size_t kLanes = 8;  // lanes do not wait for each other's products
  std::array<std::uint64_t, kLanes> lanes{};
  std::size_t at = 0;
  for (; at + sizeof(lanes) <= memory.size(); at += sizeof(lanes))
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      std::uint64_t word = 0;
      std::memcpy(&word, memory.data() + at + lane * sizeof(word), sizeof(word));
      // A product moves bits up only: turned round, the highest ones reach the others, too.
      lanes[lane] = std::rotl((lanes[lane] ^ word) * kFactor, kTurn);
    }
  std::uint64_t hash = memory.size();
  for (const std::uint64_t lane : lanes) hash = (hash ^ lane ^ (lane >> 32)) * kFactor;
  for (; at < memory.size(); at += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, memory.data() + at, std::min(sizeof(word), memory.size() - at));
    hash = std::rotl((hash ^ word) * kFactor, kTurn);
  }
  return hash ^ (hash >> 32);
}

// CRC-32C (Castagnoli), as iSCSI and ext4 use it; hardware instructions where the CPU has them.
// Chains: crc32c(b, crc32c(a)) is the checksum of a followed by b.
std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t seed = 0);

// A way to compute the checksum. All methods give the same result.
struct Crc32cMethod {
  const char* name;
  std::uint32_t (*compute)(std::span<const std::byte> bytes, std::uint32_t seed);
};

// The methods that this CPU can run, fastest first.
std::vector<Crc32cMethod> crc32c_methods();

}  // namespace lockstep
