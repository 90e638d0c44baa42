#include <lockstep/optim/kernels/cuda/adam.h>

#include <cuda_runtime.h>

#include <lockstep/optim/kernels/adam_element.h>
#include <lockstep/optim/kernels/cuda/tensor_table.cuh>

namespace lockstep::optim::cuda {

namespace {

constexpr unsigned kThreads = 256;
constexpr std::int64_t kPiece = 4096;  // elements

template <typename T>
using Table = TensorTable<AdamTensor<T>, kPiece>;

template <typename T>
constexpr int kPack = 16 / sizeof(T);

template <typename T>
struct alignas(16) Pack {
  T values[kPack<T>];
};

template <typename T>
__device__ Pack<T>& pack_at(T* memory) {
  return *reinterpret_cast<Pack<T>*>(memory);
}
template <typename T>
__device__ const Pack<T>& pack_at(const T* memory) {
  return *reinterpret_cast<const Pack<T>*>(memory);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) update(const LOCKSTEP_GRID_CONSTANT Table<T> table) {
  const auto [tensor, begin, count] = table.piece();
  const AdamStep<T> step = tensor.step;
  T* const weight = tensor.weight + begin;
  const T* const gradient = tensor.gradient + begin;
  T* const exp_avg = tensor.exp_avg + begin;
  T* const exp_avg_sq = tensor.exp_avg_sq + begin;
  const auto misplaced = [](const T* pointer) {
    return reinterpret_cast<std::uintptr_t>(pointer) % 16;
  };
  const bool in_packs =
      (misplaced(weight) | misplaced(gradient) | misplaced(exp_avg) | misplaced(exp_avg_sq)) == 0;
  const std::int64_t packs = in_packs ? count / kPack<T> : 0;
  for (std::int64_t p = threadIdx.x; p < packs; p += kThreads) {
    const std::int64_t first = p * kPack<T>;
    Pack<T> w = pack_at(weight + first), m = pack_at(exp_avg + first),
            v = pack_at(exp_avg_sq + first);
    const Pack<T> g = pack_at(gradient + first);
    for (int i = 0; i < kPack<T>; ++i)
      adam_element(step, g.values[i], w.values[i], m.values[i], v.values[i]);
    pack_at(weight + first) = w;
    pack_at(exp_avg + first) = m;
    pack_at(exp_avg_sq + first) = v;
  }
  for (std::int64_t i = packs * kPack<T> + threadIdx.x; i < count; i += kThreads)
    adam_element(step, gradient[i], weight[i], exp_avg[i], exp_avg_sq[i]);
}

template <typename T>
void run(const AdamTensor<T>* tensors, std::size_t size, CUstream_st* stream) {
  for_tables<kPiece>(tensors, size, [&](const Table<T>& table, unsigned pieces) {
    update<T><<<pieces, kThreads, 0, stream>>>(table);
  });
}

}  // namespace

void adam_update(const AdamTensor<float>* tensors, std::size_t size, CUstream_st* stream) {
  run(tensors, size, stream);
}

void adam_update(const AdamTensor<double>* tensors, std::size_t size, CUstream_st* stream) {
  run(tensors, size, stream);
}

}  // namespace lockstep::optim::cuda
