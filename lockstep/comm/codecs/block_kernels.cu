#include <lockstep/comm/codecs/block_kernels.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include <lockstep/comm/codecs/block_format.h>

// Arithmetic is written with the functions that name their rounding. The compiler never fuses them,
// whatever its flags, so the bits are the CPU's.
namespace lockstep::comm::cuda {

namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kWarp = 32;
constexpr unsigned kWholeWarp = 0xffffffffu;
constexpr std::uint32_t kNaNBits = 0x7fc00000u;  // of the scale that the CPU writes
// Larger arrays take several turns of the loops in the kernels.
constexpr std::size_t kMostThreadBlocks = 1u << 20;
// Bits of the largest number of messages in a sum.
constexpr int kLevels = 16;
static_assert(kMostTerms >> kLevels == 0);

__device__ float load(float value) { return value; }
__device__ float load(__half value) { return __half2float(value); }
__device__ float load(__nv_bfloat16 value) { return __bfloat162float(value); }

__device__ void store(float value, float& out) { out = value; }
__device__ void store(float value, __half& out) { out = __float2half_rn(value); }
__device__ void store(float value, __nv_bfloat16& out) { out = __float2bfloat16_rn(value); }

__device__ std::uint32_t quantized(float value, float inverse) {
  return __float_as_uint(__fadd_rn(__fmul_rn(value, inverse), kRounder));
}

// Both formats take two neighbours at a time: the first, and the second if it exists. Payloads and
// blocks begin at even places, so that two bytes can be moved as one.
struct Int8 {
  static constexpr int kMost = 127;
  // Bytes of an even number of elements.
  __device__ static std::size_t bytes_of(std::size_t count) { return count; }
  static constexpr float kLargestScale = largest_scale(kMost);

  __device__ static void put(std::uint8_t* payload, std::size_t pair, std::uint32_t first,
                             std::uint32_t second, bool has_second) {
    if (has_second)
      reinterpret_cast<std::uint16_t*>(payload)[pair] =
          static_cast<std::uint16_t>((first & 0xff) | second << 8);
    else
      payload[2 * pair] = static_cast<std::uint8_t>(first);
  }
  __device__ static float2 get(const std::uint8_t* payload, std::size_t pair, bool has_second) {
    const unsigned both =
        has_second ? reinterpret_cast<const std::uint16_t*>(payload)[pair] : payload[2 * pair];
    return {static_cast<float>(static_cast<std::int8_t>(both)),
            static_cast<float>(static_cast<std::int8_t>(both >> 8))};
  }
};

struct Int4 {
  static constexpr int kMost = 7;
  __device__ static std::size_t bytes_of(std::size_t count) { return count / 2; }
  static constexpr float kLargestScale = largest_scale(kMost);

  __device__ static void put(std::uint8_t* payload, std::size_t pair, std::uint32_t first,
                             std::uint32_t second, bool has_second) {
    const std::uint32_t high = has_second ? second << 4 : 0;
    payload[pair] = static_cast<std::uint8_t>((first & 0x0f) | high);
  }
  __device__ static float2 get(const std::uint8_t* payload, std::size_t pair, bool) {
    const std::uint8_t both = payload[pair];
    const auto low = static_cast<std::int8_t>(both << 4);
    return {static_cast<float>(low >> 4), static_cast<float>(static_cast<std::int8_t>(both) >> 4)};
  }
};

// The layout of one message, as the kernels need it.
struct Layout {
  std::size_t count;    // elements
  std::size_t block;    // elements in a block
  std::size_t blocks;   // blocks in the message
  std::size_t payload;  // bytes of payload
  std::size_t scales;   // where the scales begin
  std::size_t bytes;    // bytes of the whole message
};

Layout layout_of(const BlockFormat& format, std::size_t count) {
  Layout layout{};
  layout.count = count;
  layout.block = format.block;
  layout.blocks = num_blocks(count, format);
  layout.payload = format.type == QuantizedType::int8 ? count : count / 2 + count % 2;
  layout.scales = scales_offset(count, format);
  layout.bytes = encoded_bytes(count, format);
  return layout;
}

__device__ std::size_t smaller(std::size_t a, std::size_t b) { return a < b ? a : b; }

// The largest value of the warp's threads.
__device__ std::uint32_t largest_of_warp(std::uint32_t value) {
  for (unsigned distance = kWarp / 2; distance > 0; distance /= 2) {
    const std::uint32_t other = __shfl_xor_sync(kWholeWarp, value, distance);
    if (other > value) value = other;
  }
  return value;
}

// Both kernels give a warp to each block of each message, or of each part of the sums, so that
// divisions are made once for all numbers of a block.
__device__ std::size_t first_warp() {
  return static_cast<std::size_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
}
__device__ std::size_t num_warps() {
  return static_cast<std::size_t>(gridDim.x) * (kThreads / kWarp);
}

template <typename Quantized, typename T>
__global__ void encode_kernel(Layout layout, PartTable table, const T* values,
                              std::uint8_t* messages) {
  const unsigned lane = threadIdx.x % kWarp;
  const std::size_t total = table.rows * table.columns * layout.blocks;
  for (std::size_t warp = first_warp(); warp < total; warp += num_warps()) {
    const std::size_t index = warp / layout.blocks;
    const std::size_t block = warp % layout.blocks;
    const std::size_t part = index % table.rows * table.columns + index / table.rows;
    const std::size_t begin = block * layout.block;
    const std::size_t count = smaller(layout.block, layout.count - begin);
    const T* from = values + part * layout.count + begin;
    std::uint8_t* message = messages + index * layout.bytes;
    std::uint8_t* payload = message + Quantized::bytes_of(begin);

    std::uint32_t largest_bits = 0;
    for (std::size_t i = lane; i < count; i += kWarp) {
      const std::uint32_t bits = __float_as_uint(load(from[i])) & 0x7fffffffu;
      if (bits > largest_bits) largest_bits = bits;
    }
    largest_bits = largest_of_warp(largest_bits);
    const bool finite = largest_bits < kInfinityBits;
    float scale = __fdiv_rn(__uint_as_float(largest_bits), Quantized::kMost);
    if (scale < kSmallestScale) scale = kSmallestScale;
    if (scale > Quantized::kLargestScale) scale = Quantized::kLargestScale;
    const float inverse = __fdiv_rn(1.0f, scale);
    for (std::size_t pair = lane; 2 * pair < count; pair += kWarp) {
      const bool has_second = 2 * pair + 1 < count;
      const std::uint32_t first = finite ? quantized(load(from[2 * pair]), inverse) : 0;
      const std::uint32_t second =
          finite && has_second ? quantized(load(from[2 * pair + 1]), inverse) : 0;
      Quantized::put(payload, pair, first, second, has_second);
    }
    if (lane == 0)
      reinterpret_cast<std::uint32_t*>(message + layout.scales)[block] =
          finite ? __float_as_uint(scale) : kNaNBits;
    if (block + 1 == layout.blocks && lane < layout.scales - layout.payload)
      message[layout.payload + lane] = 0;
  }
}

__device__ float2 add(float2 left, float2 right) {
  return {__fadd_rn(left.x, right.x), __fadd_rn(left.y, right.y)};
}

// Sums over 1, 2, 4, … messages wait at the level of their size for another of the same size, as in
// a binary counter with carries; at the end the remaining sums are added from the right. That is
// the tree that splits at powers of two. Levels are unrolled, so that they are registers.
template <typename Quantized, typename T>
__global__ void decode_sums_kernel(Layout layout, SumTable table, const std::uint8_t* messages,
                                   float divisor, T* values) {
  const unsigned lane = threadIdx.x % kWarp;
  const std::size_t total = table.parts * layout.blocks;
  for (std::size_t warp = first_warp(); warp < total; warp += num_warps()) {
    const std::size_t part = warp / layout.blocks;
    const std::size_t block = warp % layout.blocks;
    const std::size_t begin = block * layout.block;
    const std::size_t count = smaller(layout.block, layout.count - begin);
    for (std::size_t pair = lane; 2 * pair < count; pair += kWarp) {
      const bool has_second = 2 * pair + 1 < count;
      float2 waiting[kLevels];
      for (std::size_t term = 0; term < table.terms; ++term) {
        const std::uint8_t* message = messages + (term * table.parts + part) * layout.bytes;
        const float scale = reinterpret_cast<const float*>(message + layout.scales)[block];
        float2 sum = Quantized::get(message + Quantized::bytes_of(begin), pair, has_second);
        sum = {__fmul_rn(sum.x, scale), __fmul_rn(sum.y, scale)};
        bool carries = true;
#pragma unroll
        for (int level = 0; level < kLevels; ++level) {
          if (!carries) continue;
          if ((term >> level & 1) != 0) {
            sum = add(waiting[level], sum);
          } else {
            waiting[level] = sum;
            carries = false;
          }
        }
      }
      float2 sum{0, 0};
      bool any = false;
#pragma unroll
      for (int level = 0; level < kLevels; ++level) {
        if ((table.terms >> level & 1) == 0) continue;
        sum = any ? add(waiting[level], sum) : waiting[level];
        any = true;
      }
      T* out = values + part * layout.count + begin + 2 * pair;
      store(__fdiv_rn(sum.x, divisor), out[0]);
      if (has_second) store(__fdiv_rn(sum.y, divisor), out[1]);
    }
  }
}

unsigned thread_blocks(std::size_t warps) {
  constexpr std::size_t each = kThreads / kWarp;
  return static_cast<unsigned>(std::min((warps + each - 1) / each, kMostThreadBlocks));
}

template <typename Quantized, typename T>
void encode(const Layout& layout, const PartTable& table, const std::byte* values,
            std::byte* messages, cudaStream_t stream) {
  const std::size_t warps = table.num_parts() * layout.blocks;
  if (warps == 0) return;
  encode_kernel<Quantized><<<thread_blocks(warps), kThreads, 0, stream>>>(
      layout, table, reinterpret_cast<const T*>(values), reinterpret_cast<std::uint8_t*>(messages));
}

template <typename Quantized, typename T>
void decode(const Layout& layout, const SumTable& table, const std::byte* messages, float divisor,
            std::byte* values, cudaStream_t stream) {
  const std::size_t warps = table.parts * layout.blocks;
  if (warps == 0) return;
  decode_sums_kernel<Quantized><<<thread_blocks(warps), kThreads, 0, stream>>>(
      layout, table, reinterpret_cast<const std::uint8_t*>(messages), divisor,
      reinterpret_cast<T*>(values));
}

template <typename Quantized>
void encode_type(const Layout& layout, DType dtype, const PartTable& table, const std::byte* values,
                 std::byte* messages, cudaStream_t stream) {
  switch (dtype) {
    case DType::float16: return encode<Quantized, __half>(layout, table, values, messages, stream);
    case DType::bfloat16:
      return encode<Quantized, __nv_bfloat16>(layout, table, values, messages, stream);
    default: return encode<Quantized, float>(layout, table, values, messages, stream);
  }
}

template <typename Quantized>
void decode_type(const Layout& layout, DType dtype, const SumTable& table,
                 const std::byte* messages, float divisor, std::byte* values, cudaStream_t stream) {
  switch (dtype) {
    case DType::float16:
      return decode<Quantized, __half>(layout, table, messages, divisor, values, stream);
    case DType::bfloat16:
      return decode<Quantized, __nv_bfloat16>(layout, table, messages, divisor, values, stream);
    default: return decode<Quantized, float>(layout, table, messages, divisor, values, stream);
  }
}

}  // namespace

void encode_parts(const BlockFormat& format, DType dtype, const std::byte* values,
                  const PartTable& table, std::byte* messages, CUstream_st* stream) {
  const Layout layout = layout_of(format, table.count);
  if (format.type == QuantizedType::int8)
    encode_type<Int8>(layout, dtype, table, values, messages, stream);
  else
    encode_type<Int4>(layout, dtype, table, values, messages, stream);
}

void decode_sums(const BlockFormat& format, DType dtype, const std::byte* messages,
                 const SumTable& table, float divisor, std::byte* values, CUstream_st* stream) {
  const Layout layout = layout_of(format, table.count);
  if (format.type == QuantizedType::int8)
    decode_type<Int8>(layout, dtype, table, messages, divisor, values, stream);
  else
    decode_type<Int4>(layout, dtype, table, messages, divisor, values, stream);
}

}  // namespace lockstep::comm::cuda
