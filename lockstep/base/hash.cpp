#include <lockstep/base/hash.h>

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#if !defined(__clang__)
#include <arm_acle.h>
#endif
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace lockstep {

namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78u;  // reflected

// Zeros that follow a block of `kLane` bytes change its CRC by a linear map; a table of that map
// lets three blocks be hashed side by side, which hides the instruction's latency.
constexpr std::size_t kLane = 1024;

// Multiplies by x, in reflected order, modulo the polynomial.
constexpr std::uint32_t step_bit(std::uint32_t crc) {
  return (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
}

constexpr std::uint32_t step_byte(std::uint32_t crc, std::uint8_t byte) {
  crc ^= byte;
  for (int bit = 0; bit < 8; ++bit) crc = step_bit(crc);
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
#ifdef __clang__
#define LOCKSTEP_CRC_TARGET __attribute__((target("crc")))
#else
#define LOCKSTEP_CRC_TARGET __attribute__((target("+crc")))
#endif
LOCKSTEP_CRC_TARGET inline std::uint32_t step64(std::uint32_t crc, std::uint64_t word) {
#if defined(__clang__)  // whose header has it only where the whole file is for such CPUs
  return __builtin_arm_crc32cd(crc, word);
#else
  return __crc32cd(crc, word);
#endif
}
LOCKSTEP_CRC_TARGET inline std::uint32_t step8(std::uint32_t crc, std::uint8_t byte) {
#if defined(__clang__)
  return __builtin_arm_crc32cb(crc, byte);
#else
  return __crc32cb(crc, byte);
#endif
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

#if defined(__x86_64__)
#define LOCKSTEP_WIDE_TARGET __attribute__((target("avx512f,vpclmulqdq,sse4.2")))

// A product without carries moves 128 bits of message forward by `bits`: modulo the polynomial, the
// two halves times these constants are the same as they were where they stood.
struct Forward {
  std::uint64_t low;
  std::uint64_t high;

  explicit constexpr Forward(int bits) : low(power(bits + 32)), high(power(bits - 32)) {}

  // x to the n-th, reflected; the product of two reflected numbers is one bit short.
  static constexpr std::uint64_t power(int n) {
    std::uint32_t value = 0x80000000u;
    for (int i = 0; i < n; ++i) value = step_bit(value);
    return std::uint64_t{value} << 1;
  }
};

LOCKSTEP_WIDE_TARGET inline __m512i load512(const std::byte* at) { return _mm512_loadu_si512(at); }

LOCKSTEP_WIDE_TARGET inline __m512i forward(__m512i value, __m512i by, __m512i onto) {
  constexpr int kXorOfThree = 0x96;
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(value, by, 0x00),
                                   _mm512_clmulepi64_epi128(value, by, 0x11), onto, kXorOfThree);
}

LOCKSTEP_WIDE_TARGET inline __m512i wide(const Forward& by) {
  const auto low = static_cast<long long>(by.low);
  const auto high = static_cast<long long>(by.high);
  return _mm512_set_epi64(high, low, high, low, high, low, high, low);
}

// Folds four vectors at a time onto the next four, until what is left is as long as one instruction
// takes.
LOCKSTEP_WIDE_TARGET std::uint32_t crc_wide(const std::byte* at, std::size_t size,
                                            std::uint32_t crc) {
  constexpr std::size_t kVector = 64;
  constexpr std::size_t kStep = 4 * kVector;
  if (size < 2 * kStep) return crc_instruction(at, size, crc);
  constexpr Forward kFourVectors(8 * kStep);
  constexpr Forward kOneVector(8 * kVector);
  const __m512i step = wide(kFourVectors);
  __m512i a = _mm512_xor_si512(load512(at), _mm512_set_epi64(0, 0, 0, 0, 0, 0, 0, crc));
  __m512i b = load512(at + kVector);
  __m512i c = load512(at + 2 * kVector);
  __m512i d = load512(at + 3 * kVector);
  for (at += kStep, size -= kStep; size >= kStep; at += kStep, size -= kStep) {
    a = forward(a, step, load512(at));
    b = forward(b, step, load512(at + kVector));
    c = forward(c, step, load512(at + 2 * kVector));
    d = forward(d, step, load512(at + 3 * kVector));
  }
  const __m512i one = wide(kOneVector);
  d = forward(forward(forward(a, one, b), one, c), one, d);
  alignas(kVector) std::uint64_t rest[8];
  _mm512_store_si512(rest, d);
  crc = 0;
  for (const std::uint64_t word : rest) crc = step64(crc, word);
  return crc_instruction(at, size, crc);
}

bool have_wide() {
  return have_instruction() && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("vpclmulqdq");
}
#endif

template <std::uint32_t (*compute)(const std::byte*, std::size_t, std::uint32_t)>
std::uint32_t complemented(std::span<const std::byte> bytes, std::uint32_t seed) {
  return ~compute(bytes.data(), bytes.size(), ~seed);
}

}  // namespace

std::vector<Crc32cMethod> crc32c_methods() {
  std::vector<Crc32cMethod> methods;
#if defined(LOCKSTEP_WIDE_TARGET)
  if (have_wide()) methods.push_back({"products of vectors", complemented<crc_wide>});
#endif
#if defined(LOCKSTEP_CRC_TARGET)
  if (have_instruction()) methods.push_back({"instruction", complemented<crc_instruction>});
#endif
  methods.push_back({"tables", complemented<crc_plain>});
  return methods;
}

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t seed) {
  static const auto fastest = crc32c_methods().front().compute;
  return fastest(bytes, seed);
}

}  // namespace lockstep
