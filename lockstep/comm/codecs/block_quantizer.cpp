#include <lockstep/comm/codecs/block_quantizer.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include <lockstep/base/error.h>
#include <lockstep/base/float16.h>
#include <lockstep/base/simd.h>

namespace lockstep::comm {

namespace {

constexpr std::uint32_t kInfinityBits = 0x7f800000u;

// A float whose last bit counts ones. With a small number added, its low bits are that number,
// rounded to a whole one.
constexpr float kRounder = 0x1.8p23f;

// The largest scale that the largest number of times is finite.
constexpr float largest_scale(int most) {
  const float scale = std::numeric_limits<float>::max() / static_cast<float>(most);
  const bool fits = double{scale} * most <= double{std::numeric_limits<float>::max()};
  return fits ? scale : std::bit_cast<float>(std::bit_cast<std::uint32_t>(scale) - 1);
}

// What is done with a decoded value.
struct Set {
  [[gnu::always_inline]] static void apply(float value, float& out) { out = value; }
  [[gnu::always_inline]] static void apply(float value, Float16& out) {
    out.bits = to_float16(value).bits;
  }
  [[gnu::always_inline]] static void apply(float value, BFloat16& out) {
    out.bits = to_bfloat16(value).bits;
  }
};
struct Add {
  [[gnu::always_inline]] static void apply(float value, float& out) { out += value; }
};

inline float load(float value) { return value; }
inline float load(Float16 value) { return to_float(value); }
inline float load(BFloat16 value) { return to_float(value); }

// In two's complement, in the low bits.
inline std::uint8_t quantized(float value, float inverse) {
  return static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(value * inverse + kRounder));
}

struct Int8 {
  static constexpr int kMost = 127;
  static constexpr std::size_t bytes_of(std::size_t count) { return count; }

  template <typename T>
  [[gnu::always_inline]] static void pack(const T* __restrict values, std::size_t count,
                                          float inverse, std::uint8_t* __restrict payload) {
    for (std::size_t i = 0; i < count; ++i) payload[i] = quantized(load(values[i]), inverse);
  }

  template <typename Use, typename T>
  [[gnu::always_inline]] static void unpack(const std::uint8_t* __restrict payload,
                                            std::size_t count, float scale, T* __restrict out) {
    for (std::size_t i = 0; i < count; ++i)
      Use::apply(static_cast<float>(static_cast<std::int8_t>(payload[i])) * scale, out[i]);
  }
};

struct Int4 {
  static constexpr int kMost = 7;
  static constexpr std::size_t bytes_of(std::size_t count) { return (count + 1) / 2; }

  template <typename T>
  [[gnu::always_inline]] static void pack(const T* __restrict values, std::size_t count,
                                          float inverse, std::uint8_t* __restrict payload) {
    for (std::size_t i = 0; i < count / 2; ++i) {
      const std::uint8_t low = quantized(load(values[2 * i]), inverse);
      const std::uint8_t high = quantized(load(values[2 * i + 1]), inverse);
      payload[i] = static_cast<std::uint8_t>((low & 0x0f) | (high << 4));
    }
    if (count % 2 != 0) payload[count / 2] = quantized(load(values[count - 1]), inverse) & 0x0f;
  }

  template <typename Use, typename T>
  [[gnu::always_inline]] static void unpack(const std::uint8_t* __restrict payload,
                                            std::size_t count, float scale, T* __restrict out) {
    for (std::size_t i = 0; i < count / 2; ++i) {
      Use::apply(low_half(payload[i]) * scale, out[2 * i]);
      Use::apply(high_half(payload[i]) * scale, out[2 * i + 1]);
    }
    if (count % 2 != 0) Use::apply(low_half(payload[count / 2]) * scale, out[count - 1]);
  }

 private:
  static float low_half(std::uint8_t byte) {
    return static_cast<float>(static_cast<std::int8_t>(byte << 4) >> 4);
  }
  static float high_half(std::uint8_t byte) {
    return static_cast<float>(static_cast<std::int8_t>(byte) >> 4);
  }
};

// Magnitudes are ordered as their bits are, with inf and nan above all numbers.
[[gnu::always_inline]] inline float largest_magnitude(const float* __restrict values,
                                                      std::size_t count) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i)
    largest = std::max(largest, std::bit_cast<std::uint32_t>(values[i]) & 0x7fffffffu);
  return std::bit_cast<float>(largest);
}

template <typename T>
[[gnu::always_inline]] inline float largest_magnitude(const T* __restrict values,
                                                      std::size_t count) {
  std::uint16_t largest = 0;
  for (std::size_t i = 0; i < count; ++i)
    largest = std::max(largest, static_cast<std::uint16_t>(values[i].bits & 0x7fffu));
  return load(T{largest});
}

// Gives the scale.
template <typename Quantized, typename T>
[[gnu::always_inline]] inline float encode_block(const T* values, std::size_t count,
                                                 std::uint8_t* payload) {
  const float largest = largest_magnitude(values, count);
  if (std::bit_cast<std::uint32_t>(largest) >= kInfinityBits) {
    std::memset(payload, 0, Quantized::bytes_of(count));
    return std::numeric_limits<float>::quiet_NaN();
  }
  const float scale = std::clamp(largest / Quantized::kMost, std::numeric_limits<float>::min(),
                                 largest_scale(Quantized::kMost));
  Quantized::pack(values, count, 1 / scale, payload);
  return scale;
}

template <typename Quantized, typename T>
[[gnu::always_inline]] inline void encode(const BlockFormat& format, const std::byte* values,
                                          std::size_t count, std::byte* message) {
  if (count == 0) return;
  std::byte* next_scale = message + scales_offset(count, format);
  std::memset(message + Quantized::bytes_of(count), 0,
              scales_offset(count, format) - Quantized::bytes_of(count));
  for (std::size_t begin = 0; begin < count; begin += format.block) {
    const float scale = encode_block<Quantized>(
        reinterpret_cast<const T*>(values) + begin, std::min(format.block, count - begin),
        reinterpret_cast<std::uint8_t*>(message) + Quantized::bytes_of(begin));
    std::memcpy(next_scale, &scale, sizeof(scale));
    next_scale += sizeof(scale);
  }
}

template <typename Quantized, typename Use, typename T>
[[gnu::always_inline]] inline void decode(const BlockFormat& format, const std::byte* message,
                                          std::size_t count, T* out) {
  const std::byte* next_scale = message + scales_offset(count, format);
  for (std::size_t begin = 0; begin < count; begin += format.block) {
    float scale = 0;
    std::memcpy(&scale, next_scale, sizeof(scale));
    next_scale += sizeof(scale);
    Quantized::template unpack<Use>(
        reinterpret_cast<const std::uint8_t*>(message) + Quantized::bytes_of(begin),
        std::min(format.block, count - begin), scale, out + begin);
  }
}

template <typename Quantized>
[[gnu::always_inline]] inline void encode_type(const BlockFormat& format, DType dtype,
                                               const std::byte* values, std::size_t count,
                                               std::byte* message) {
  switch (dtype) {
    case DType::float16: return encode<Quantized, Float16>(format, values, count, message);
    case DType::bfloat16: return encode<Quantized, BFloat16>(format, values, count, message);
    default: return encode<Quantized, float>(format, values, count, message);
  }
}

template <typename Quantized>
[[gnu::always_inline]] inline void decode_type(const BlockFormat& format, DType dtype,
                                               const std::byte* message, std::size_t count,
                                               std::byte* out) {
  switch (dtype) {
    case DType::float16:
      return decode<Quantized, Set>(format, message, count, reinterpret_cast<Float16*>(out));
    case DType::bfloat16:
      return decode<Quantized, Set>(format, message, count, reinterpret_cast<BFloat16*>(out));
    default: return decode<Quantized, Set>(format, message, count, reinterpret_cast<float*>(out));
  }
}

void check_dtype(DType dtype) {
  if (dtype != DType::float32 && dtype != DType::float16 && dtype != DType::bfloat16)
    throw UsageError("{} values cannot be quantized: float32, float16 and bfloat16 can",
                     name(dtype));
}

}  // namespace

LOCKSTEP_SIMD void encode_blocks(const BlockFormat& format, DType dtype, const std::byte* values,
                                 std::size_t count, std::byte* message) {
  check_format(format);
  check_dtype(dtype);
  if (format.type == QuantizedType::int8)
    encode_type<Int8>(format, dtype, values, count, message);
  else
    encode_type<Int4>(format, dtype, values, count, message);
}

LOCKSTEP_SIMD void decode_blocks(const BlockFormat& format, DType dtype, const std::byte* message,
                                 std::size_t count, std::byte* values) {
  check_format(format);
  check_dtype(dtype);
  if (format.type == QuantizedType::int8)
    decode_type<Int8>(format, dtype, message, count, values);
  else
    decode_type<Int4>(format, dtype, message, count, values);
}

LOCKSTEP_SIMD void decode_and_add(const BlockFormat& format, const std::byte* message,
                                  std::size_t count, float* sums) {
  check_format(format);
  if (format.type == QuantizedType::int8)
    decode<Int8, Add>(format, message, count, sums);
  else
    decode<Int4, Add>(format, message, count, sums);
}

}  // namespace lockstep::comm
