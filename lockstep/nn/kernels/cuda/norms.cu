#include <lockstep/nn/kernels/cuda/kernels.h>

#include <cuda_runtime.h>

#include <algorithm>

#include <lockstep/nn/kernels/cuda/packs.cuh>

namespace lockstep::nn::cuda {

namespace {

constexpr unsigned kMostThreads = 256;
constexpr unsigned kMostWarps = kMostThreads / kWarp;
// The most thread blocks that add up the weights' gradients, each over its own rows.
constexpr std::int64_t kMostPartialSums = 1024;

// A thread has four adjacent elements, once or several times in a row. Calls body(turn, first
// column) for each four.
template <int kTurns, typename Body>
__device__ void for_columns(std::int64_t width, const Body& body) {
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const std::int64_t column =
        (threadIdx.x + static_cast<std::int64_t>(turn) * blockDim.x) * kFour;
    if (column < width) body(turn, column);
  }
}

// One thread block computes one row.
template <int kTurns, NormKind kKind, typename X, typename Y>
__global__ void __launch_bounds__(kMostThreads)
    forward_rows(std::int64_t width, float eps, const X* x, const Y* update, X* sum,
                 const float* weight, const float* bias, Y* y, float* means, float* inverses) {
  __shared__ float2 shared[kMostWarps];
  const std::int64_t row = blockIdx.x, start = row * width;
  float values[kTurns][kFour];
  float total = 0;
  for_columns<kTurns>(width, [&](int turn, std::int64_t column) {
    load_four(x + start + column, values[turn]);
    if (update != nullptr) {
      float added[kFour];
      load_four(update + start + column, added);
      for (int i = 0; i < kFour; ++i) {
        // Backward reads the sum, so the norm is of the sum as it is rounded.
        values[turn][i] = to_float(from_float<X>(values[turn][i] + added[i]));
      }
      store_four(values[turn], sum + start + column);
    }
    for (int i = 0; i < kFour; ++i) total += values[turn][i];
  });
  const auto count = static_cast<float>(width);
  float mean = 0;
  if (kKind == NormKind::layer) mean = sum_over_block({total, 0}, shared).x / count;
  float squares = 0;
  for_columns<kTurns>(width, [&](int turn, std::int64_t) {
    for (int i = 0; i < kFour; ++i) {
      const float apart = values[turn][i] - mean;
      squares += apart * apart;
    }
  });
  squares = sum_over_block({squares, 0}, shared).x;
  const float inverse = rsqrtf(squares / count + eps);
  if (threadIdx.x == 0) {
    inverses[row] = inverse;
    if (kKind == NormKind::layer) means[row] = mean;
  }
  for_columns<kTurns>(width, [&](int turn, std::int64_t column) {
    float factors[kFour], shifts[kFour] = {};
    load_four(weight + column, factors);
    if (bias != nullptr) load_four(bias + column, shifts);
    for (int i = 0; i < kFour; ++i)
      factors[i] = (values[turn][i] - mean) * inverse * factors[i] + shifts[i];
    store_four(factors, y + start + column);
  });
}

// Each thread block takes every n-th row of n blocks, and keeps the sums of its rows' contributions
// to the weights' gradients.
template <int kTurns, NormKind kKind, typename X, typename Y>
__global__ void __launch_bounds__(kMostThreads)
    backward_rows(std::int64_t rows, std::int64_t width, const Y* y_gradient, const X* x,
                  const float* weight, const float* means, const float* inverses,
                  const X* sum_gradient, X* x_gradient, Y* update_gradient, float* weight_sums,
                  float* bias_sums) {
  __shared__ float2 shared[kMostWarps];
  float factors[kTurns][kFour] = {};
  float of_weight[kTurns][kFour] = {};
  float of_bias[kTurns][kFour] = {};
  for_columns<kTurns>(
      width, [&](int turn, std::int64_t column) { load_four(weight + column, factors[turn]); });
  const auto count = static_cast<float>(width);
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const std::int64_t start = row * width;
    const float inverse = inverses[row];
    const float mean = kKind == NormKind::layer ? means[row] : 0;
    float normed[kTurns][kFour], slopes[kTurns][kFour];
    float2 totals = {0, 0};
    for_columns<kTurns>(width, [&](int turn, std::int64_t column) {
      load_four(x + start + column, normed[turn]);
      load_four(y_gradient + start + column, slopes[turn]);
      for (int i = 0; i < kFour; ++i) {
        float& here = normed[turn][i];
        float& slope = slopes[turn][i];
        here = (here - mean) * inverse;
        of_weight[turn][i] += slope * here;
        of_bias[turn][i] += slope;
        slope *= factors[turn][i];
        totals.x += slope * here;
        totals.y += slope;
      }
    });
    totals = sum_over_block(totals, shared);
    const float along = totals.x / count;
    const float level = kKind == NormKind::layer ? totals.y / count : 0;
    for_columns<kTurns>(width, [&](int turn, std::int64_t column) {
      float from_sum[kFour] = {};
      if (sum_gradient != nullptr) load_four(sum_gradient + start + column, from_sum);
      for (int i = 0; i < kFour; ++i)
        from_sum[i] += inverse * (slopes[turn][i] - level - normed[turn][i] * along);
      store_four(from_sum, x_gradient + start + column);
      if (update_gradient != nullptr) store_four(from_sum, update_gradient + start + column);
    });
  }
  for_columns<kTurns>(width, [&](int turn, std::int64_t column) {
    store_four(of_weight[turn], weight_sums + blockIdx.x * width + column);
    if (bias_sums != nullptr) store_four(of_bias[turn], bias_sums + blockIdx.x * width + column);
  });
}

// Sums the columns of the thread blocks' partial sums: each lane of a warp has a column, and each
// warp takes every kSumWarps-th row.
constexpr unsigned kSumWarps = 32;
__global__ void __launch_bounds__(kSumWarps* kWarp)
    sum_columns(std::int64_t rows, std::int64_t width, const float* partial, float* sums) {
  __shared__ float shared[kSumWarps][kWarp];
  const unsigned warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * kWarp + lane;
  float total = 0;
  if (column < width)
    for (std::int64_t row = warp; row < rows; row += kSumWarps)
      total += partial[row * width + column];
  shared[warp][lane] = total;
  __syncthreads();
  if (warp != 0 || column >= width) return;
  total = 0;
  for (unsigned i = 0; i < kSumWarps; ++i) total += shared[i][lane];
  sums[column] = total;
}

std::int64_t num_partial_sums(const NormShape& shape) {
  return std::min(shape.rows, kMostPartialSums);
}

unsigned threads_of(std::int64_t width, int turns) {
  const std::int64_t fours = width / kFour;
  const std::int64_t a_turn = (fours + turns - 1) / turns;
  return static_cast<unsigned>((a_turn + kWarp - 1) / kWarp * kWarp);
}

template <int kTurns, NormKind kKind, typename X, typename Y>
void run(const NormShape& shape, const NormForward& what, CUstream_st* stream) {
  forward_rows<kTurns, kKind>
      <<<static_cast<unsigned>(shape.rows), threads_of(shape.width, kTurns), 0, stream>>>(
          shape.width, shape.eps, static_cast<const X*>(what.x), static_cast<const Y*>(what.update),
          static_cast<X*>(what.sum), what.weight, what.bias, static_cast<Y*>(what.y), what.mean,
          what.inverse);
}

template <int kTurns, NormKind kKind, typename X, typename Y>
void run(const NormShape& shape, const NormBackward& what, CUstream_st* stream) {
  const std::int64_t partial = num_partial_sums(shape);
  float* const weight_sums = what.scratch;
  float* const bias_sums =
      what.bias_gradient == nullptr ? nullptr : what.scratch + partial * shape.width;
  backward_rows<kTurns, kKind>
      <<<static_cast<unsigned>(partial), threads_of(shape.width, kTurns), 0, stream>>>(
          shape.rows, shape.width, static_cast<const Y*>(what.y_gradient),
          static_cast<const X*>(what.x), what.weight, what.mean, what.inverse,
          static_cast<const X*>(what.sum_gradient), static_cast<X*>(what.x_gradient),
          static_cast<Y*>(what.update_gradient), weight_sums, bias_sums);
  const auto blocks = static_cast<unsigned>((shape.width + kWarp - 1) / kWarp);
  sum_columns<<<blocks, kSumWarps * kWarp, 0, stream>>>(partial, shape.width, weight_sums,
                                                        what.weight_gradient);
  if (bias_sums != nullptr)
    sum_columns<<<blocks, kSumWarps * kWarp, 0, stream>>>(partial, shape.width, bias_sums,
                                                          what.bias_gradient);
}

template <NormKind kKind, typename X, typename Y, typename What>
void run_width(const NormShape& shape, const What& what, CUstream_st* stream) {
  const std::int64_t a_turn = kMostThreads * kFour;
  if (shape.width <= a_turn) return run<1, kKind, X, Y>(shape, what, stream);
  if (shape.width <= 2 * a_turn) return run<2, kKind, X, Y>(shape, what, stream);
  if (shape.width <= 4 * a_turn) return run<4, kKind, X, Y>(shape, what, stream);
  return run<8, kKind, X, Y>(shape, what, stream);
}

template <typename X, typename Y, typename What>
void run_kind(const NormShape& shape, const What& what, CUstream_st* stream) {
  if (shape.kind == NormKind::layer)
    run_width<NormKind::layer, X, Y>(shape, what, stream);
  else
    run_width<NormKind::rms, X, Y>(shape, what, stream);
}

template <typename What>
void run_types(const NormShape& shape, const What& what, CUstream_st* stream) {
  if (what.x_type == Element::float16) return run_kind<__half, __half>(shape, what, stream);
  if (what.x_type == Element::bfloat16)
    return run_kind<__nv_bfloat16, __nv_bfloat16>(shape, what, stream);
  switch (what.y_type) {
    case Element::float32: return run_kind<float, float>(shape, what, stream);
    case Element::float16: return run_kind<float, __half>(shape, what, stream);
    case Element::bfloat16: return run_kind<float, __nv_bfloat16>(shape, what, stream);
  }
}

}  // namespace

void norm_forward(const NormShape& shape, const NormForward& what, CUstream_st* stream) {
  if (shape.rows > 0) run_types(shape, what, stream);
}

std::size_t norm_scratch_floats(const NormShape& shape) {
  return 2 * static_cast<std::size_t>(num_partial_sums(shape) * shape.width);
}

void norm_backward(const NormShape& shape, const NormBackward& what, CUstream_st* stream) {
  if (shape.rows > 0) run_types(shape, what, stream);
}

}  // namespace lockstep::nn::cuda
