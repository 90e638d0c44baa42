#include <lockstep/optim/kernels/cuda/kernels.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <lockstep/optim/kernels/cuda/tensor_table.cuh>

namespace lockstep::optim::cuda {

namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kWarp = 32;
constexpr unsigned kWholeWarp = 0xffffffffu;
constexpr int kOfAThread = kNormBlock / kThreads;
static_assert(kNormBlock % kThreads == 0 && (kOfAThread & (kOfAThread - 1)) == 0);

using Table = TensorTable<NormTensor, kNormBlock>;

__device__ double to_double(double value) { return value; }
__device__ double to_double(float value) { return value; }
__device__ double to_double(__half value) { return __half2float(value); }
__device__ double to_double(__nv_bfloat16 value) { return __bfloat162float(value); }

// Folded in half until one number is left: elements that are a multiple of the threads apart are in
// the same thread, so that the first folds need nobody else.
template <typename T>
__device__ void sum_block(const T* values, std::int64_t count, double* sum) {
  double squares[kOfAThread];
#pragma unroll
  for (int i = 0; i < kOfAThread; ++i) {
    const std::int64_t place = threadIdx.x + static_cast<std::int64_t>(i) * kThreads;
    const double value = place < count ? to_double(values[place]) : 0.0;
    squares[i] = value * value;
  }
#pragma unroll
  for (int width = kOfAThread / 2; width > 0; width /= 2)
#pragma unroll
    for (int i = 0; i < width; ++i) squares[i] += squares[i + width];
  __shared__ double shared[kThreads];
  shared[threadIdx.x] = squares[0];
  for (unsigned width = kThreads / 2; width >= kWarp; width /= 2) {
    __syncthreads();
    if (threadIdx.x < width) shared[threadIdx.x] += shared[threadIdx.x + width];
  }
  if (threadIdx.x >= kWarp) return;
  __syncwarp();
  double mine = shared[threadIdx.x];
  for (unsigned width = kWarp / 2; width > 0; width /= 2)
    mine += __shfl_down_sync(kWholeWarp, mine, width);
  if (threadIdx.x == 0) *sum = mine;
}

__global__ void __launch_bounds__(kThreads) sum_blocks(const LOCKSTEP_GRID_CONSTANT Table table) {
  const auto [tensor, begin, count] = table.piece();
  double* const sum = tensor.sums + begin / kNormBlock;
  switch (tensor.type) {
    case Element::float64:
      return sum_block(static_cast<const double*>(tensor.values) + begin, count, sum);
    case Element::float32:
      return sum_block(static_cast<const float*>(tensor.values) + begin, count, sum);
    case Element::float16:
      return sum_block(static_cast<const __half*>(tensor.values) + begin, count, sum);
    case Element::bfloat16:
      return sum_block(static_cast<const __nv_bfloat16*>(tensor.values) + begin, count, sum);
  }
}

// A thread block of one warp for each sum. All threads add the same numbers, of which each has
// fetched one; the next are fetched meanwhile.
__global__ void __launch_bounds__(kWarp)
    add_segments(const double* values, const std::int64_t* table, std::int64_t num_sums,
                 double* sums) {
  const std::int64_t* const segments = table + num_sums + 1;
  double total = 0;
  for (std::int64_t segment = table[blockIdx.x]; segment < table[blockIdx.x + 1]; ++segment) {
    const std::int64_t end = segments[2 * segment + 1];
    std::int64_t mine = segments[2 * segment] + threadIdx.x;
    double next = mine < end ? values[mine] : 0.0;
    for (std::int64_t first = segments[2 * segment]; first < end; first += kWarp) {
      const double value = next;
      mine += kWarp;
      next = mine < end ? values[mine] : 0.0;
      // Elements behind the end count as 0, which changes no sum.
#pragma unroll
      for (unsigned i = 0; i < kWarp; ++i) total += __shfl_sync(kWholeWarp, value, i);
    }
  }
  if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

}  // namespace

void add_in_order(const double* values, const std::int64_t* table, std::int64_t num_sums,
                  double* sums, CUstream_st* stream) {
  if (num_sums > 0)
    add_segments<<<static_cast<unsigned>(num_sums), kWarp, 0, stream>>>(values, table, num_sums,
                                                                        sums);
}

void sum_of_squares(const NormTensor* tensors, std::size_t size, CUstream_st* stream) {
  for_tables<kNormBlock>(tensors, size, [&](const Table& table, unsigned pieces) {
    sum_blocks<<<pieces, kThreads, 0, stream>>>(table);
  });
}

}  // namespace lockstep::optim::cuda
