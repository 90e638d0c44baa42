#include <lockstep/base/hash.h>

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace lockstep {

namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78u;  // reflected

// Zeros that follow a block of `kLane` bytes change its CRC by a linear map; a table of that map
// lets three blocks be hashed side by side, which hides the instruction's latency.
constexpr std::size_t kLane = 1024;

constexpr std::uint32_t step_byte(std::uint32_t crc, std::uint8_t byte) {
  crc ^= byte;
  for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
  return crc;
}

struct Tables {
  std::array<std::array<std::uint32_t, 256>, 8> slice{};  // slicing-by-8, for plain CPUs
  std::array<std::array<std::uint32_t, 256>, 4> shift{};  // append kLane zero bytes

  Tables() {
    for (std::uint32_t i = 0; i < 256; ++i) slice[0][i] = step_byte(i, 0);
    for (std::uint32_t i = 0; i < 256; ++i)
      for (std::size_t k = 1; k < 8; ++k)
        slice[k][i] = (slice[k - 1][i] >> 8) ^ slice[0][slice[k - 1][i] & 0xff];
    for (std::size_t k = 0; k < 4; ++k) {
      for (std::uint32_t i = 0; i < 256; ++i) {
        std::uint32_t crc = i << (8 * k);
        for (std::size_t zero = 0; zero < kLane; ++zero) crc = (crc >> 8) ^ slice[0][crc & 0xff];
        shift[k][i] = crc;
      }
    }
  }

  std::uint32_t append_lane_of_zeros(std::uint32_t crc) const {
    return shift[0][crc & 0xff] ^ shift[1][(crc >> 8) & 0xff] ^ shift[2][(crc >> 16) & 0xff] ^
           shift[3][crc >> 24];
  }
};

const Tables& tables() {
  static const Tables instance;
  return instance;
}

std::uint64_t load64(const std::byte* at) {
  std::uint64_t value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

std::uint32_t crc_plain(const std::byte* at, std::size_t size, std::uint32_t crc) {
  const auto& slice = tables().slice;
  for (; size >= 8; size -= 8, at += 8) {
    const std::uint64_t word = load64(at) ^ crc;
    crc = 0;
    for (int k = 0; k < 8; ++k) crc ^= slice[7 - k][(word >> (8 * k)) & 0xff];
  }
  for (; size > 0; --size, ++at)
    crc = (crc >> 8) ^ slice[0][(crc ^ static_cast<std::uint8_t>(*at)) & 0xff];
  return crc;
}

#if defined(__x86_64__)
#define LOCKSTEP_CRC_TARGET __attribute__((target("sse4.2")))
LOCKSTEP_CRC_TARGET inline std::uint32_t step64(std::uint32_t crc, std::uint64_t word) {
  return static_cast<std::uint32_t>(_mm_crc32_u64(crc, word));
}
LOCKSTEP_CRC_TARGET inline std::uint32_t step8(std::uint32_t crc, std::uint8_t byte) {
  return _mm_crc32_u8(crc, byte);
}
bool have_instruction() { return __builtin_cpu_supports("sse4.2"); }
#elif defined(__aarch64__) && defined(__linux__)
#define LOCKSTEP_CRC_TARGET __attribute__((target("+crc")))
LOCKSTEP_CRC_TARGET inline std::uint32_t step64(std::uint32_t crc, std::uint64_t word) {
  return __crc32cd(crc, word);
}
LOCKSTEP_CRC_TARGET inline std::uint32_t step8(std::uint32_t crc, std::uint8_t byte) {
  return __crc32cb(crc, byte);
}
bool have_instruction() { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
#endif

#if defined(LOCKSTEP_CRC_TARGET)
LOCKSTEP_CRC_TARGET std::uint32_t crc_instruction(const std::byte* at, std::size_t size,
                                                  std::uint32_t crc) {
  const Tables& table = tables();
  for (; size >= 3 * kLane; size -= 3 * kLane, at += 3 * kLane) {
    std::uint32_t second = 0;
    std::uint32_t third = 0;
    for (std::size_t i = 0; i < kLane; i += 8) {
      crc = step64(crc, load64(at + i));
      second = step64(second, load64(at + kLane + i));
      third = step64(third, load64(at + 2 * kLane + i));
    }
    crc = table.append_lane_of_zeros(crc) ^ second;
    crc = table.append_lane_of_zeros(crc) ^ third;
  }
  for (; size >= 8; size -= 8, at += 8) crc = step64(crc, load64(at));
  for (; size > 0; --size, ++at) crc = step8(crc, static_cast<std::uint8_t>(*at));
  return crc;
}
#endif

}  // namespace

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t seed) {
#if defined(LOCKSTEP_CRC_TARGET)
  static const bool fast = have_instruction();
  if (fast) return ~crc_instruction(bytes.data(), bytes.size(), ~seed);
#endif
  return ~crc_plain(bytes.data(), bytes.size(), ~seed);
}

}  // namespace lockstep
