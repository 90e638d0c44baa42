#include <lockstep/nn/kernels/cuda/kernels.h>

#include <cuda_runtime.h>

#include <lockstep/nn/kernels/cuda/packs.cuh>

namespace lockstep::nn::cuda {

namespace {

constexpr unsigned kThreads = 256;

__device__ float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }

struct Forward {
  template <typename T>
  __device__ static void element(T gate, T up, T& result) {
    const float x = to_float(gate);
    result = from_float<T>(x * sigmoid(x) * to_float(up));
  }
};

struct Backward {
  template <typename T>
  __device__ static void element(T gate, T up, T gradient, T& gate_gradient, T& up_gradient) {
    const float x = to_float(gate), slope = to_float(gradient);
    const float share = sigmoid(x);
    gate_gradient = from_float<T>(slope * to_float(up) * share * (1.0f + x * (1.0f - share)));
    up_gradient = from_float<T>(slope * x * share);
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads)
    forward(std::int64_t count, const T* gate, const T* up, T* result) {
  const std::int64_t all = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  const std::int64_t me = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const std::int64_t packs = in_packs(gate, up, result) ? count / kPack<T> : 0;
  for (std::int64_t p = me; p < packs; p += all) {
    const Pack<T> gates = load_pack(gate + p * kPack<T>), ups = load_pack(up + p * kPack<T>);
    Pack<T> results;
    for (int i = 0; i < kPack<T>; ++i)
      Forward::element(gates.values[i], ups.values[i], results.values[i]);
    store_pack(results, result + p * kPack<T>);
  }
  for (std::int64_t i = packs * kPack<T> + me; i < count; i += all)
    Forward::element(gate[i], up[i], result[i]);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    backward(std::int64_t count, const T* gate, const T* up, const T* gradient, T* gate_gradient,
             T* up_gradient) {
  const std::int64_t all = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  const std::int64_t me = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const std::int64_t packs =
      in_packs(gate, up, gradient, gate_gradient, up_gradient) ? count / kPack<T> : 0;
  for (std::int64_t p = me; p < packs; p += all) {
    const std::int64_t first = p * kPack<T>;
    const Pack<T> gates = load_pack(gate + first), ups = load_pack(up + first),
                  slopes = load_pack(gradient + first);
    Pack<T> to_gate, to_up;
    for (int i = 0; i < kPack<T>; ++i)
      Backward::element(gates.values[i], ups.values[i], slopes.values[i], to_gate.values[i],
                        to_up.values[i]);
    store_pack(to_gate, gate_gradient + first);
    store_pack(to_up, up_gradient + first);
  }
  for (std::int64_t i = packs * kPack<T> + me; i < count; i += all)
    Backward::element(gate[i], up[i], gradient[i], gate_gradient[i], up_gradient[i]);
}

template <typename T>
unsigned blocks_of(std::int64_t count) {
  return blocks_for((count + kPack<T> - 1) / kPack<T>, kThreads);
}

template <typename T>
void run(std::int64_t count, const void* gate, const void* up, void* result, CUstream_st* stream) {
  forward<<<blocks_of<T>(count), kThreads, 0, stream>>>(
      count, static_cast<const T*>(gate), static_cast<const T*>(up), static_cast<T*>(result));
}

template <typename T>
void run(std::int64_t count, const void* gate, const void* up, const void* gradient,
         void* gate_gradient, void* up_gradient, CUstream_st* stream) {
  backward<<<blocks_of<T>(count), kThreads, 0, stream>>>(
      count, static_cast<const T*>(gate), static_cast<const T*>(up),
      static_cast<const T*>(gradient), static_cast<T*>(gate_gradient),
      static_cast<T*>(up_gradient));
}

}  // namespace

void silu_multiply(Element type, std::int64_t count, const void* gate, const void* up, void* result,
                   CUstream_st* stream) {
  if (count == 0) return;
  switch (type) {
    case Element::float32: return run<float>(count, gate, up, result, stream);
    case Element::float16: return run<__half>(count, gate, up, result, stream);
    case Element::bfloat16: return run<__nv_bfloat16>(count, gate, up, result, stream);
  }
}

void silu_multiply_backward(Element type, std::int64_t count, const void* gate, const void* up,
                            const void* gradient, void* gate_gradient, void* up_gradient,
                            CUstream_st* stream) {
  if (count == 0) return;
  switch (type) {
    case Element::float32:
      return run<float>(count, gate, up, gradient, gate_gradient, up_gradient, stream);
    case Element::float16:
      return run<__half>(count, gate, up, gradient, gate_gradient, up_gradient, stream);
    case Element::bfloat16:
      return run<__nv_bfloat16>(count, gate, up, gradient, gate_gradient, up_gradient, stream);
  }
}

}  // namespace lockstep::nn::cuda
