// Memory in packs of 16 bytes, and sums over a thread block, for all kernels here.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include <lockstep/base/packs.cuh>

namespace lockstep::nn::cuda {

constexpr unsigned kWarp = 32;
constexpr unsigned kWholeWarp = 0xffffffffu;

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__half value) { return __half2float(value); }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T>
__device__ T from_float(float value);
template <>
__device__ inline float from_float<float>(float value) {
  return value;
}
template <>
__device__ inline __half from_float<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

using packs::in_packs;
using packs::kPack;
using packs::load_pack;
using packs::Pack;
using packs::store_pack;

// Four adjacent elements, at a multiple of their size.
constexpr int kFour = 4;

template <typename T>
struct alignas(kFour * sizeof(T)) FourOf {
  T values[kFour];
};

template <typename T>
__device__ void load_four(const T* from, float (&to)[kFour]) {
  const auto four = *reinterpret_cast<const FourOf<T>*>(from);
  for (int i = 0; i < kFour; ++i) to[i] = to_float(four.values[i]);
}

template <typename T>
__device__ void store_four(const float (&from)[kFour], T* to) {
  FourOf<T> four;
  for (int i = 0; i < kFour; ++i) four.values[i] = from_float<T>(from[i]);
  *reinterpret_cast<FourOf<T>*>(to) = four;
}

// A row of memory in the order in which kernels go through it: single elements up to the first
// multiple of 16 bytes, packs, and single elements again.
template <typename T>
struct RowParts {
  std::int64_t head;  // elements before the first pack
  std::int64_t packs;
  std::int64_t tail;  // where the elements after the packs begin

  __device__ RowParts(const T* row, std::int64_t count) {
    const auto over = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(row) % 16);
    head = over == 0 ? 0 : (16 - over) / static_cast<std::int64_t>(sizeof(T));
    if (head > count) head = count;
    packs = (count - head) / kPack<T>;
    tail = head + packs * kPack<T>;
  }
};

__device__ inline float sum_over_warp(float value) {
  for (unsigned distance = kWarp / 2; distance > 0; distance /= 2)
    value += __shfl_xor_sync(kWholeWarp, value, distance);
  return value;
}

// Sums two numbers over a block of threads; every thread gets the sums. `shared` has room for one
// pair of each warp.
__device__ inline float2 sum_over_block(float2 value, float2* shared) {
  const unsigned warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const unsigned num_warps = blockDim.x / kWarp;
  value = {sum_over_warp(value.x), sum_over_warp(value.y)};
  if (num_warps == 1) return value;
  __syncthreads();  // other threads may still read the values from before
  if (lane == 0) shared[warp] = value;
  __syncthreads();
  value = lane < num_warps ? shared[lane] : float2{0, 0};
  return {sum_over_warp(value.x), sum_over_warp(value.y)};
}

// The number of thread blocks for so many pieces of work; loops in the kernels take the pieces
// beyond the largest grid.
inline unsigned blocks_for(std::int64_t pieces, unsigned threads) {
  constexpr std::int64_t kMost = 1 << 20;
  const std::int64_t wanted = (pieces + threads - 1) / threads;
  return static_cast<unsigned>(wanted < kMost ? wanted : kMost);
}

}  // namespace lockstep::nn::cuda
