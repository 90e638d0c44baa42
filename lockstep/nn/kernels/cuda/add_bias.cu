#include <lockstep/nn/kernels/cuda/kernels.h>

#include <cuda_runtime.h>

#include <algorithm>
#include <numeric>

#include <lockstep/nn/kernels/cuda/packs.cuh>

namespace lockstep::nn::cuda {

namespace {

constexpr unsigned kThreads = 256;
// Enough thread blocks to keep any GPU busy.
constexpr std::int64_t kBlocks = 4096;
// Loads that each thread has under way at the same time.
constexpr int kAtOnce = 4;

// The number of all threads is a multiple of the packs in a row. So a thread has the same columns
// in every row, and reads their bias once.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    add_bias_to_rows(T* values, std::int64_t packs, std::int64_t packs_of_row, const float* bias) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t column = first % packs_of_row * kPack<T>;
  float shifts[kPack<T>];
  for (int i = 0; i < kPack<T>; ++i) shifts[i] = bias[column + i];
  const auto shifted = [&](Pack<T> pack) {
    for (int i = 0; i < kPack<T>; ++i)
      pack.values[i] = from_float<T>(to_float(pack.values[i]) + shifts[i]);
    return pack;
  };
  std::int64_t p = first;
  for (; p + (kAtOnce - 1) * step < packs; p += kAtOnce * step) {
    Pack<T> loaded[kAtOnce];
    for (int i = 0; i < kAtOnce; ++i) loaded[i] = load_pack(values + (p + i * step) * kPack<T>);
    for (int i = 0; i < kAtOnce; ++i)
      store_pack(shifted(loaded[i]), values + (p + i * step) * kPack<T>);
  }
  for (; p < packs; p += step)
    store_pack(shifted(load_pack(values + p * kPack<T>)), values + p * kPack<T>);
}

template <typename T>
void launch(const BiasedRows& rows, const float* bias, CUstream_st* stream) {
  const std::int64_t packs_of_row = rows.width / kPack<T>;
  const std::int64_t packs = rows.rows * packs_of_row;
  if (packs == 0) return;
  const std::int64_t unit = packs_of_row / std::gcd<std::int64_t>(packs_of_row, kThreads);
  const std::int64_t wanted = std::min(kBlocks, (packs + kThreads - 1) / kThreads);
  const std::int64_t blocks = std::max<std::int64_t>(1, wanted / unit) * unit;
  add_bias_to_rows<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      static_cast<T*>(rows.values), packs, packs_of_row, bias);
}

}  // namespace

void add_bias(const BiasedRows& rows, const float* bias, CUstream_st* stream) {
  switch (rows.type) {
    case Element::float32: return launch<float>(rows, bias, stream);
    case Element::float16: return launch<__half>(rows, bias, stream);
    case Element::bfloat16: return launch<__nv_bfloat16>(rows, bias, stream);
  }
}

}  // namespace lockstep::nn::cuda
