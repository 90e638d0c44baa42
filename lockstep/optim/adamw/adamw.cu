#include <lockstep/optim/adamw/cuda.h>

#include <cuda_runtime.h>

#include <lockstep/base/packs.cuh>
#include <lockstep/optim/kernels/cuda/tensor_table.cuh>

namespace lockstep::optim::cuda {

namespace {

using packs::in_packs;
using packs::kPack;
using packs::load_pack;
using packs::Pack;
using packs::store_pack;

constexpr unsigned kThreads = 256;
constexpr std::int64_t kPiece = 4096;  // elements

template <typename T>
using Table = TensorTable<AdamTensor<T>, kPiece>;

template <typename T>
__global__ void __launch_bounds__(kThreads)
    update(const LOCKSTEP_GRID_CONSTANT Table<T> table, const double* factor) {
  const double exact = factor == nullptr ? 1.0 : *factor;
  if (exact == 0) return;
  const T times = static_cast<T>(exact);
  const auto [tensor, begin, count] = table.piece();
  const AdamStep<T> step = tensor.step;
  T* const weight = tensor.weight + begin;
  const T* const gradient = tensor.gradient + begin;
  T* const exp_avg = tensor.exp_avg + begin;
  T* const exp_avg_sq = tensor.exp_avg_sq + begin;
  const std::int64_t packs = in_packs(weight, gradient, exp_avg, exp_avg_sq) ? count / kPack<T> : 0;
  for (std::int64_t p = threadIdx.x; p < packs; p += kThreads) {
    const std::int64_t first = p * kPack<T>;
    Pack<T> w = load_pack(weight + first), m = load_pack(exp_avg + first),
            v = load_pack(exp_avg_sq + first);
    const Pack<T> g = load_pack(gradient + first);
    for (int i = 0; i < kPack<T>; ++i)
      adam_element(step, g.values[i] * times, w.values[i], m.values[i], v.values[i]);
    store_pack(w, weight + first);
    store_pack(m, exp_avg + first);
    store_pack(v, exp_avg_sq + first);
  }
  for (std::int64_t i = packs * kPack<T> + threadIdx.x; i < count; i += kThreads)
    adam_element(step, gradient[i] * times, weight[i], exp_avg[i], exp_avg_sq[i]);
}

template <typename T>
void run(const AdamTensor<T>* tensors, std::size_t size, const double* factor,
         CUstream_st* stream) {
  for_tables<kPiece>(tensors, size, [&](const Table<T>& table, unsigned pieces) {
    update<T><<<pieces, kThreads, 0, stream>>>(table, factor);
  });
}

}  // namespace

void adam_update(const AdamTensor<float>* tensors, std::size_t size, const double* factor,
                 CUstream_st* stream) {
  run(tensors, size, factor, stream);
}

void adam_update(const AdamTensor<double>* tensors, std::size_t size, const double* factor,
                 CUstream_st* stream) {
  run(tensors, size, factor, stream);
}

}  // namespace lockstep::optim::cuda
