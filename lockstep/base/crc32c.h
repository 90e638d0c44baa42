// The checksum of what travels between hosts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace lockstep {

// CRC-32C (Castagnoli), as iSCSI and ext4 use it; hardware instructions where the CPU has them.
// Chains: crc32c(b, crc32c(a)) is the checksum of a followed by b.
std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t seed = 0);

// A way to compute it; all give the same.
struct Crc32cMethod {
  const char* name;
  std::uint32_t (*compute)(std::span<const std::byte> bytes, std::uint32_t seed);
};

// Those that this CPU can run, fastest first.
std::vector<Crc32cMethod> crc32c_methods();

}  // namespace lockstep
