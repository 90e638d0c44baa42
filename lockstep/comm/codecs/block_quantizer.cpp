#include <lockstep/comm/codecs/block_quantizer.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <type_traits>

#include <lockstep/base/error.h>
#include <lockstep/base/float16.h>
#include <lockstep/base/simd.h>
#include <lockstep/comm/codecs/block_format.h>

namespace lockstep::comm {

void check_format(const BlockFormat& format) {
  if (format.block == 0 || format.block % 2 != 0)
    throw UsageError("blocks of {} elements cannot be quantized: give an even number above 0, such "
                     "as 256",
                     format.block);
}

std::size_t num_blocks(std::size_t count, const BlockFormat& format) {
  return count / format.block + (count % format.block != 0 ? 1 : 0);
}

std::size_t scales_offset(std::size_t count, const BlockFormat& format) {
  const std::size_t payload = format.type == QuantizedType::int8 ? count : count / 2 + count % 2;
  return (payload + 3) / 4 * 4;
}

std::size_t encoded_bytes(std::size_t count, const BlockFormat& format) {
  return scales_offset(count, format) + num_blocks(count, format) * sizeof(float);
}

namespace {

// Ways to store a decoded value.
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

// The quantized value in two's complement, in the low bits.
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

// Encodes a block and returns its scale.
template <typename Quantized, typename T>
[[gnu::always_inline]] inline float encode_block(const T* values, std::size_t count,
                                                 std::uint8_t* payload) {
  const float largest = largest_magnitude(values, count);
  if (std::bit_cast<std::uint32_t>(largest) >= kInfinityBits) {
    std::memset(payload, 0, Quantized::bytes_of(count));
    return std::numeric_limits<float>::quiet_NaN();
  }
  const float scale =
      std::clamp(largest / Quantized::kMost, kSmallestScale, largest_scale(Quantized::kMost));
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

inline float scale_at(const std::byte* scales, std::size_t block) {
  float scale = 0;
  std::memcpy(&scale, scales + block * sizeof(scale), sizeof(scale));
  return scale;
}

template <typename Quantized, typename T>
[[gnu::always_inline]] inline void decode(const BlockFormat& format, const std::byte* message,
                                          std::size_t count, std::byte* values) {
  const std::byte* scales = message + scales_offset(count, format);
  for (std::size_t block = 0, begin = 0; begin < count; ++block, begin += format.block)
    Quantized::template unpack<Set>(
        reinterpret_cast<const std::uint8_t*>(message) + Quantized::bytes_of(begin),
        std::min(format.block, count - begin), scale_at(scales, block),
        reinterpret_cast<T*>(values) + begin);
}

// Numbers that are added at once, few enough for the partial sums of all sizes to stay in the
// cache.
constexpr std::size_t kPiece = 256;
// Enough partial sums for 2^32 messages.
constexpr std::size_t kMostPartialSums = 33;

struct PartialSums {
  alignas(64) float of[kMostPartialSums][kPiece];
};

struct Place {
  std::size_t begin;  // where the piece begins in the message
  std::size_t count;
  std::size_t block;  // the block whose scale the piece has
};

template <typename Quantized, typename Use>
[[gnu::always_inline]] inline void unpack_piece(const std::byte* message, std::size_t scales,
                                                const Place& place, float* out) {
  Quantized::template unpack<Use>(
      reinterpret_cast<const std::uint8_t*>(message) + Quantized::bytes_of(place.begin),
      place.count, scale_at(message + scales, place.block), out);
}

[[gnu::always_inline]] inline void add_to(float* __restrict left, const float* __restrict right,
                                          std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) left[i] += right[i];
}

// The whole sum is computed directly in the output if that has floats, otherwise in a partial sum.
[[gnu::always_inline]] inline float* place_of_sum(float* out, PartialSums&) { return out; }
template <typename T>
[[gnu::always_inline]] inline float* place_of_sum(T*, PartialSums& partial) {
  return partial.of[0];
}

// Two sums over equally many messages are added to one, as in a binary counter with carries; at the
// end the remaining sums are added from the right. That is the tree that splits at powers of two.
template <typename Quantized>
[[gnu::always_inline]] inline void sum_piece(const Messages& messages, std::size_t scales,
                                             const Place& place, PartialSums& partial, float* sum) {
  const auto at = [&](std::size_t depth) { return depth == 0 ? sum : partial.of[depth]; };
  std::size_t depth = 0;
  for (std::size_t k = 0; k < messages.number; ++k) {
    const std::byte* message = messages.first + k * messages.stride;
    if (k % 2 == 0) {
      unpack_piece<Quantized, Set>(message, scales, place, at(depth++));
      continue;
    }
    unpack_piece<Quantized, Add>(message, scales, place, at(depth - 1));
    for (std::size_t pairs = (k + 1) / 2; pairs % 2 == 0; pairs /= 2, --depth)
      add_to(at(depth - 2), at(depth - 1), place.count);
  }
  for (; depth > 1; --depth) add_to(at(depth - 2), at(depth - 1), place.count);
}

template <typename T>
[[gnu::always_inline]] inline void finish_piece(const float* sum, std::size_t count, float divisor,
                                                T* out) {
  if (divisor != 1)
    for (std::size_t i = 0; i < count; ++i) Set::apply(sum[i] / divisor, out[i]);
  else if (!std::is_same_v<T, float>)
    for (std::size_t i = 0; i < count; ++i) Set::apply(sum[i], out[i]);
}

template <typename Quantized, typename T>
[[gnu::always_inline]] inline void decode_sum_of(const BlockFormat& format,
                                                 const Messages& messages, std::size_t count,
                                                 float divisor, std::byte* values,
                                                 PartialSums& partial) {
  if (messages.number == 1 && divisor == 1)
    return decode<Quantized, T>(format, messages.first, count, values);
  const std::size_t scales = scales_offset(count, format);
  for (std::size_t block = 0; block < num_blocks(count, format); ++block) {
    const std::size_t end = std::min((block + 1) * format.block, count);
    for (std::size_t begin = block * format.block; begin < end; begin += kPiece) {
      const Place place{begin, std::min(kPiece, end - begin), block};
      T* out = reinterpret_cast<T*>(values) + begin;
      float* sum = place_of_sum(out, partial);
      sum_piece<Quantized>(messages, scales, place, partial, sum);
      finish_piece(sum, place.count, divisor, out);
    }
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
[[gnu::always_inline]] inline void decode_sum_type(const BlockFormat& format, DType dtype,
                                                   const Messages& messages, std::size_t count,
                                                   float divisor, std::byte* values,
                                                   PartialSums& partial) {
  switch (dtype) {
    case DType::float16:
      return decode_sum_of<Quantized, Float16>(format, messages, count, divisor, values, partial);
    case DType::bfloat16:
      return decode_sum_of<Quantized, BFloat16>(format, messages, count, divisor, values, partial);
    default:
      return decode_sum_of<Quantized, float>(format, messages, count, divisor, values, partial);
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

LOCKSTEP_SIMD void decode_sum(const BlockFormat& format, DType dtype, const Messages& messages,
                              std::size_t count, float divisor, std::byte* values) {
  check_format(format);
  check_dtype(dtype);
  LOCKSTEP_CHECK(messages.number > 0 && messages.number >> (kMostPartialSums - 1) == 0,
                 "a sum of {} messages", messages.number);
  PartialSums partial;
  if (format.type == QuantizedType::int8)
    decode_sum_type<Int8>(format, dtype, messages, count, divisor, values, partial);
  else
    decode_sum_type<Int4>(format, dtype, messages, count, divisor, values, partial);
}

void decode_blocks(const BlockFormat& format, DType dtype, const std::byte* message,
                   std::size_t count, std::byte* values) {
  decode_sum(format, dtype, {.first = message, .number = 1, .stride = 0}, count, 1, values);
}

}  // namespace lockstep::comm
