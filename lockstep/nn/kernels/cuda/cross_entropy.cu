#include <lockstep/nn/kernels/cuda/kernels.h>

#include <cuda_runtime.h>

// A target outside the vocabulary stops the program in every build, as in LibTorch's own loss.
#undef NDEBUG
#include <cassert>
#include <cmath>

#include <lockstep/nn/kernels/cuda/packs.cuh>

namespace lockstep::nn::cuda {

namespace {

constexpr float kLog2E = 1.4426950408889634f;
constexpr unsigned kMostWarps = 16;

// The largest of a set of numbers, and the sum of their exponentials relative to it.
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

// Combines the threads' values; all threads of the block get the result.
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

// Reduces a row, and gives the result to all threads of its block.
template <typename T>
__device__ Exponentials of_row(const T* row, std::int64_t vocabulary) {
  const RowParts<T> parts(row, vocabulary);
  Exponentials mine;
  const auto take = [&](std::int64_t i) {
    const float value = to_float(row[i]);
    mine.rise_to(value);
    mine.add(value);
  };
  for (std::int64_t i = threadIdx.x; i < parts.head; i += blockDim.x) take(i);
  for (std::int64_t p = threadIdx.x; p < parts.packs; p += blockDim.x) {
    const Pack<T> pack = load_pack(row + parts.head + p * kPack<T>);
    float largest = -INFINITY;
    for (int i = 0; i < kPack<T>; ++i) largest = fmaxf(largest, to_float(pack.values[i]));
    mine.rise_to(largest);
    for (int i = 0; i < kPack<T>; ++i) mine.add(to_float(pack.values[i]));
  }
  for (std::int64_t i = parts.tail + threadIdx.x; i < vocabulary; i += blockDim.x) take(i);
  return over_block(mine);
}

// The gradient of a row: (softmax - one_hot(target)) · factor. It may be written over the logits;
// elsewhere it begins as far from a multiple of 16 bytes as they do.
template <typename T>
struct RowGradient {
  float largest;
  float inverse;  // 1 / the sum of exponentials
  std::int64_t target;
  float factor;

  __device__ T of(std::int64_t i, T logit) const {
    const float share = exp2f((to_float(logit) - largest) * kLog2E) * inverse;
    return from_float<T>((i == target ? share - 1.0f : share) * factor);
  }

  __device__ void write(const T* from, T* to, std::int64_t vocabulary) const {
    const RowParts<T> parts(from, vocabulary);
    for (std::int64_t i = threadIdx.x; i < parts.head; i += blockDim.x) to[i] = of(i, from[i]);
    for (std::int64_t p = threadIdx.x; p < parts.packs; p += blockDim.x) {
      const std::int64_t first = parts.head + p * kPack<T>;
      Pack<T> pack = load_pack(from + first);
      for (int i = 0; i < kPack<T>; ++i) pack.values[i] = of(first + i, pack.values[i]);
      store_pack(pack, to + first);
    }
    for (std::int64_t i = parts.tail + threadIdx.x; i < vocabulary; i += blockDim.x)
      to[i] = of(i, from[i]);
  }
};

template <typename T>
__device__ void write_zeros(T* row, std::int64_t vocabulary) {
  for (std::int64_t i = threadIdx.x; i < vocabulary; i += blockDim.x) row[i] = from_float<T>(0);
}

// One thread block computes one row. The second pass reads the row from the cache.
template <typename T>
__global__ void __launch_bounds__(kMostWarps* kWarp)
    cross_entropy_of_rows(T* logits, const std::int64_t* targets, std::int64_t vocabulary,
                          std::int64_t ignore_index, float* losses, bool gradients) {
  const std::int64_t row = blockIdx.x;
  T* const one = logits + row * vocabulary;
  const std::int64_t target = targets[row];
  if (target == ignore_index) {
    if (threadIdx.x == 0) losses[row] = 0;
    if (gradients) write_zeros(one, vocabulary);
    return;
  }
  const Exponentials all = of_row(one, vocabulary);
  const bool inside = target >= 0 && target < vocabulary;
  if (threadIdx.x == 0)
    losses[row] = inside ? (all.largest - to_float(one[target])) + logf(all.sum) : NAN;
  if (!gradients) return;
  __syncthreads();  // the target's logit has been read
  RowGradient<T>{all.largest, 1.0f / all.sum, target, 1.0f}.write(one, one, vocabulary);
}

// A thread block for each row, as in gradients_of_rows().
template <typename T>
__global__ void __launch_bounds__(kMostWarps* kWarp)
    losses_of_rows(const T* logits, const std::int64_t* targets, std::int64_t vocabulary,
                   std::int64_t ignore_index, float* losses, float* largest, float* inverse) {
  const std::int64_t row = blockIdx.x;
  const T* const one = logits + row * vocabulary;
  const std::int64_t target = targets[row];
  if (target == ignore_index) {
    if (threadIdx.x == 0) losses[row] = largest[row] = inverse[row] = 0;
    return;
  }
  const Exponentials all = of_row(one, vocabulary);
  if (threadIdx.x != 0) return;
  assert(target >= 0 && target < vocabulary);
  losses[row] = (all.largest - to_float(one[target])) + logf(all.sum);
  largest[row] = all.largest;
  inverse[row] = 1.0f / all.sum;
}

template <typename T>
__global__ void __launch_bounds__(kMostWarps* kWarp)
    gradients_of_rows(const T* logits, const std::int64_t* targets, std::int64_t vocabulary,
                      std::int64_t ignore_index, const float* largest, const float* inverse,
                      const float* factors, T* gradient) {
  const std::int64_t row = blockIdx.x;
  T* const to = gradient + row * vocabulary;
  if (targets[row] == ignore_index) return write_zeros(to, vocabulary);
  RowGradient<T>{largest[row], inverse[row], targets[row], factors[row]}.write(
      logits + row * vocabulary, to, vocabulary);
}

// Calls launch(a T, blocks, threads) for the type of the logits.
template <typename Launch>
void for_rows(const LogitBlock& block, const Launch& launch) {
  if (block.rows == 0) return;
  const auto blocks = static_cast<unsigned>(block.rows);
  const unsigned threads = block.vocabulary >= 4096 ? kMostWarps * kWarp : 4 * kWarp;
  switch (block.type) {
    case Element::float32: return launch(float{}, blocks, threads);
    case Element::float16: return launch(__half{}, blocks, threads);
    case Element::bfloat16: return launch(__nv_bfloat16{}, blocks, threads);
  }
}

}  // namespace

void softmax_cross_entropy(const LogitBlock& block, float* losses, bool gradients,
                           CUstream_st* stream) {
  for_rows(block, [&](auto element, unsigned blocks, unsigned threads) {
    using T = decltype(element);
    cross_entropy_of_rows<<<blocks, threads, 0, stream>>>(static_cast<T*>(block.logits),
                                                          block.targets, block.vocabulary,
                                                          block.ignore_index, losses, gradients);
  });
}

void cross_entropy_forward(const LogitBlock& block, const RowLosses& rows, CUstream_st* stream) {
  for_rows(block, [&](auto element, unsigned blocks, unsigned threads) {
    using T = decltype(element);
    losses_of_rows<<<blocks, threads, 0, stream>>>(
        static_cast<const T*>(block.logits), block.targets, block.vocabulary, block.ignore_index,
        rows.losses, rows.largest, rows.inverse);
  });
}

void cross_entropy_backward(const LogitBlock& block, const RowLosses& rows, const float* factors,
                            void* gradient, CUstream_st* stream) {
  for_rows(block, [&](auto element, unsigned blocks, unsigned threads) {
    using T = decltype(element);
    gradients_of_rows<<<blocks, threads, 0, stream>>>(
        static_cast<const T*>(block.logits), block.targets, block.vocabulary, block.ignore_index,
        rows.largest, rows.inverse, factors, static_cast<T*>(gradient));
  });
}

}  // namespace lockstep::nn::cuda
