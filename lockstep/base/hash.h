// A hash for names and ids.
#pragma once

#include <cstdint>
#include <string_view>

namespace lockstep {

// A 64-bit hash of a text, the same on every machine and in every version. Not against an
// adversary.
constexpr std::uint64_t hash_text(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325ull;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  // FNV leaves the high bits of short texts poor; one round of mixing spreads them.
  hash ^= hash >> 32;
  hash *= 0xd6e8feb86659fd93ull;
  return hash ^ (hash >> 32);
}

}  // namespace lockstep
