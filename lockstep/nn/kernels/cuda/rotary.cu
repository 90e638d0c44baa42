#include <lockstep/nn/kernels/cuda/kernels.h>

#include <cuda_runtime.h>

#include <lockstep/nn/kernels/cuda/packs.cuh>

namespace lockstep::nn::cuda {

namespace {

constexpr unsigned kThreads = 256;

// A thread turns four pairs of a head.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    turn_pairs(RotaryShape shape, const T* x, const float* cosines, const float* sines,
               float direction, T* result) {
  const std::int64_t fours = shape.half / kFour;
  const std::int64_t count = shape.batch * shape.length * shape.heads * fours;
  const std::int64_t all = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += all) {
    const std::int64_t column = i % fours * kFour;
    const std::int64_t head = i / fours % shape.heads;
    const std::int64_t token = i / (fours * shape.heads) % shape.length;
    const std::int64_t sample = i / (fours * shape.heads * shape.length);
    const T* const from = x + sample * shape.batch_stride + head * shape.head_stride +
                          token * shape.token_stride + column;
    T* const to = result + i / fours * 2 * shape.half + column;
    float a[kFour], b[kFour], cosine[kFour], sine[kFour];
    load_four(from, a);
    load_four(from + shape.half, b);
    load_four(cosines + token * shape.half + column, cosine);
    load_four(sines + token * shape.half + column, sine);
    for (int k = 0; k < kFour; ++k) {
      const float first = a[k], second = b[k], turned = direction * sine[k];
      a[k] = first * cosine[k] - second * turned;
      b[k] = second * cosine[k] + first * turned;
    }
    store_four(a, to);
    store_four(b, to + shape.half);
  }
}

template <typename T>
void launch(const RotaryShape& shape, const void* x, const float* cosines, const float* sines,
            float direction, void* result, CUstream_st* stream) {
  const std::int64_t count = shape.batch * shape.length * shape.heads * (shape.half / kFour);
  turn_pairs<<<blocks_for(count, kThreads), kThreads, 0, stream>>>(
      shape, static_cast<const T*>(x), cosines, sines, direction, static_cast<T*>(result));
}

}  // namespace

void turn(const RotaryShape& shape, const void* x, const float* cosines, const float* sines,
          float direction, void* result, CUstream_st* stream) {
  if (shape.batch * shape.length * shape.heads * shape.half == 0) return;
  switch (shape.type) {
    case Element::float32:
      return launch<float>(shape, x, cosines, sines, direction, result, stream);
    case Element::float16:
      return launch<__half>(shape, x, cosines, sines, direction, result, stream);
    case Element::bfloat16:
      return launch<__nv_bfloat16>(shape, x, cosines, sines, direction, result, stream);
  }
}

}  // namespace lockstep::nn::cuda
