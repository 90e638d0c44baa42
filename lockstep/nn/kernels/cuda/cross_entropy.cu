#include <lockstep/nn/kernels/cuda/kernels.h>

#include <cuda_runtime.h>

#include <cmath>

#include <lockstep/nn/kernels/cuda/packs.cuh>

namespace lockstep::nn::cuda {

namespace {

constexpr float kLog2E = 1.4426950408889634f;
constexpr unsigned kMostWarps = 16;

// The largest of some numbers, and the sum of their exponentials relative to it.
struct Exponentials {
  float largest = -INFINITY;
  float sum = 0;

  __device__ void rise_to(float value) {
    if (!(value > largest)) return;
    sum *= exp2f((largest - value) * kLog2E);
    largest = value;
  }
  // The number must not be above the largest; all of them may be -inf.
  __device__ void add(float value) {
    sum += value == -INFINITY ? 0.0f : exp2f((value - largest) * kLog2E);
  }
  __device__ void add(const Exponentials& other) {
    rise_to(other.largest);
    sum += other.largest == -INFINITY ? other.sum
                                      : other.sum * exp2f((other.largest - largest) * kLog2E);
  }
};

__device__ Exponentials over_warp(Exponentials mine) {
  for (unsigned distance = kWarp / 2; distance > 0; distance /= 2) {
    Exponentials other;
    other.largest = __shfl_xor_sync(kWholeWarp, mine.largest, distance);
    other.sum = __shfl_xor_sync(kWholeWarp, mine.sum, distance);
    mine.add(other);
  }
  return mine;
}

// To all threads of the block.
__device__ Exponentials over_block(Exponentials mine) {
  __shared__ float largest_of[kMostWarps];
  __shared__ float sum_of[kMostWarps];
  const unsigned warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  mine = over_warp(mine);
  if (lane == 0) {
    largest_of[warp] = mine.largest;
    sum_of[warp] = mine.sum;
  }
  __syncthreads();
  Exponentials all;
  if (lane < blockDim.x / kWarp) {
    all.largest = largest_of[lane];
    all.sum = sum_of[lane];
  }
  return over_warp(all);
}

// A thread block for each row. The second pass reads what the first has left in the cache.
template <typename T>
__global__ void __launch_bounds__(kMostWarps* kWarp)
    cross_entropy_of_rows(T* logits, const std::int64_t* targets, std::int64_t vocabulary,
                          std::int64_t ignore_index, float* losses, bool gradients) {
  const std::int64_t row = blockIdx.x;
  T* const one = logits + row * vocabulary;
  const RowParts<T> parts(one, vocabulary);
  const std::int64_t target = targets[row];

  if (target == ignore_index) {
    if (threadIdx.x == 0) losses[row] = 0;
    if (!gradients) return;
    for (std::int64_t i = threadIdx.x; i < vocabulary; i += blockDim.x) one[i] = from_float<T>(0);
    return;
  }

  Exponentials mine;
  const auto take = [&](std::int64_t i) {
    const float value = to_float(one[i]);
    mine.rise_to(value);
    mine.add(value);
  };
  for (std::int64_t i = threadIdx.x; i < parts.head; i += blockDim.x) take(i);
  for (std::int64_t p = threadIdx.x; p < parts.packs; p += blockDim.x) {
    const Pack<T> pack = load_pack(one + parts.head + p * kPack<T>);
    float largest = -INFINITY;
    for (int i = 0; i < kPack<T>; ++i) largest = fmaxf(largest, to_float(pack.values[i]));
    mine.rise_to(largest);
    for (int i = 0; i < kPack<T>; ++i) mine.add(to_float(pack.values[i]));
  }
  for (std::int64_t i = parts.tail + threadIdx.x; i < vocabulary; i += blockDim.x) take(i);
  mine = over_block(mine);

  const bool inside = target >= 0 && target < vocabulary;
  if (threadIdx.x == 0)
    losses[row] = inside ? (mine.largest - to_float(one[target])) + logf(mine.sum) : NAN;
  if (!gradients) return;
  __syncthreads();  // the target's logit has been read

  const float inverse = 1.0f / mine.sum;
  const auto slope = [&](std::int64_t i, T logit) {
    const float share = exp2f((to_float(logit) - mine.largest) * kLog2E) * inverse;
    return from_float<T>(i == target ? share - 1.0f : share);
  };
  for (std::int64_t i = threadIdx.x; i < parts.head; i += blockDim.x) one[i] = slope(i, one[i]);
  for (std::int64_t p = threadIdx.x; p < parts.packs; p += blockDim.x) {
    const std::int64_t first = parts.head + p * kPack<T>;
    Pack<T> pack = load_pack(one + first);
    for (int i = 0; i < kPack<T>; ++i) pack.values[i] = slope(first + i, pack.values[i]);
    store_pack(pack, one + first);
  }
  for (std::int64_t i = parts.tail + threadIdx.x; i < vocabulary; i += blockDim.x)
    one[i] = slope(i, one[i]);
}

template <typename T>
void launch(const LogitBlock& block, float* losses, bool gradients, CUstream_st* stream) {
  const unsigned threads = block.vocabulary >= 4096 ? kMostWarps * kWarp : 4 * kWarp;
  cross_entropy_of_rows<<<static_cast<unsigned>(block.rows), threads, 0, stream>>>(
      static_cast<T*>(block.logits), block.targets, block.vocabulary, block.ignore_index, losses,
      gradients);
}

}  // namespace

void softmax_cross_entropy(const LogitBlock& block, float* losses, bool gradients,
                           CUstream_st* stream) {
  if (block.rows == 0) return;
  switch (block.type) {
    case Element::float32: return launch<float>(block, losses, gradients, stream);
    case Element::float16: return launch<__half>(block, losses, gradients, stream);
    case Element::bfloat16: return launch<__nv_bfloat16>(block, losses, gradients, stream);
  }
}

}  // namespace lockstep::nn::cuda
