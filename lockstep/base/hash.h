// Hashes of bytes: one for the wire, one for names.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace lockstep {

// CRC-32C (Castagnoli), as iSCSI and ext4 use it; hardware instructions where the CPU has them.
// Chains: crc32c(b, crc32c(a)) is the checksum of a followed by b.
std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t seed = 0);

// A 64-bit hash of a text, the same on every machine and in every version. For names and ids, not
// against an adversary.
constexpr std::uint64_t hash_text(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325ull;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  // FNV leaves the high bits of short texts poor; one round of mixing spreads them.
  hash ^= hash >> 32;
  hash *= 0xd6e8feb86659fd93ull;
  return hash ^ (hash >> 32);
}

}  // namespace lockstep
