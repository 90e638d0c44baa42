#include <lockstep/nn/layers/rotary.h>

#include <algorithm>
#include <cmath>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <lockstep/base/error.h>

#ifdef LOCKSTEP_HAVE_CUDA
#include <lockstep/nn/kernels/cuda/on_tensors.h>
#endif

namespace lockstep::nn {

namespace {

at::Tensor turned_by_operators(const at::Tensor& x, const at::Tensor& cosines,
                               const at::Tensor& sines) {
  const auto half = x.size(-1) / 2;
  const auto a = x.narrow(-1, 0, half);
  const auto b = x.narrow(-1, half, half);
  return at::cat({a * cosines - b * sines, b * cosines + a * sines}, -1).to(x.scalar_type());
}

#ifdef LOCKSTEP_HAVE_CUDA

// Whether the kernel can read x in its memory layout.
bool lies_well(const at::Tensor& x) {
  const auto well = [](std::int64_t elements) { return elements % 4 == 0; };
  return x.dim() == 4 && x.stride(-1) == 1 && well(x.size(-1) / 2) && well(x.stride(0)) &&
         well(x.stride(1)) && well(x.stride(2)) &&
         reinterpret_cast<std::uintptr_t>(x.data_ptr()) % (4 * x.element_size()) == 0;
}

// A token's heads are next to each other in the result's memory, which suits attention. The result
// is no view: recomputation takes a view of a tensor that needs no gradient for a part of a
// parameter.
at::Tensor turned_by_kernel(const at::Tensor& given, const at::Tensor& cosines,
                            const at::Tensor& sines, double direction) {
  const at::Tensor x = lies_well(given) ? given : cuda::dense(given);
  const std::int64_t heads = x.size(1), length = x.size(2), width = x.size(3);
  const at::Tensor result =
      at::empty_strided(x.sizes(), {length * heads * width, width, heads * width, 1}, x.options());
  cuda::launch_on(x, [&](CUstream_st* stream) {
    cuda::turn({.type = cuda::element_of(x.scalar_type()),
                .batch = x.size(0),
                .heads = heads,
                .length = length,
                .half = width / 2,
                .batch_stride = x.stride(0),
                .head_stride = x.stride(1),
                .token_stride = x.stride(2)},
               x.data_ptr(), cosines.data_ptr<float>(), sines.data_ptr<float>(),
               static_cast<float>(direction), result.data_ptr(), stream);
  });
  return result;
}

#endif

// Turns x by the angles, or back with direction = -1.
at::Tensor turned(const at::Tensor& x, const at::Tensor& cosines, const at::Tensor& sines,
                  double direction) {
#ifdef LOCKSTEP_HAVE_CUDA
  if (cuda::takes(x) && x.dim() == 4 && x.size(-1) % 8 == 0)
    return turned_by_kernel(x, cosines, sines, direction);
#endif
  return turned_by_operators(x, cosines, direction < 0 ? -sines : sines);
}

// Backward turns the other way and needs only the tables.
class RotaryFunction : public torch::autograd::Function<RotaryFunction> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& cosines, const at::Tensor& sines, double direction) {
    ctx->save_for_backward({cosines, sines});
    ctx->saved_data["direction"] = direction;
    return turned(x, cosines, sines, direction);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& gradients) {
    const auto tables = ctx->get_saved_variables();
    return {RotaryFunction::apply(gradients.at(0), tables.at(0), tables.at(1),
                                  -ctx->saved_data["direction"].toDouble()),
            {},
            {},
            {}};
  }
};

}  // namespace

Rotary::Rotary(std::int64_t head_dim, std::int64_t max_positions, double theta)
    : half_(head_dim / 2), max_positions_(max_positions), theta_(theta) {
  if (head_dim <= 0 || head_dim % 2 != 0)
    throw UsageError("rotary positions need heads of an even width, and these are {} wide",
                     head_dim);
}

at::Tensor Rotary::apply(const at::Tensor& x, std::int64_t first) {
  return apply(x, {mesh::Interval{first, first + x.size(-2)}});
}

at::Tensor Rotary::apply(const at::Tensor& x, const std::vector<mesh::Interval>& positions) {
  std::int64_t count = 0, needed = 0;
  for (const auto& [begin, end] : positions) {
    if (begin < 0 || end < begin || end > max_positions_)
      throw UsageError("positions {} to {} are beyond the model's {} positions", begin, end - 1,
                       max_positions_);
    count += end - begin;
    needed = std::max(needed, end);
  }
  if (count != x.size(-2))
    throw UsageError("rotary positions are given for {} tokens, and there are {}", count,
                     x.size(-2));
  if (count == 0) return x;
  need(needed, x.device());
  std::vector<at::Tensor> cosines, sines;
  for (const auto& held : positions) {
    cosines.push_back(cosines_.narrow(0, held.begin, held.size()));
    sines.push_back(sines_.narrow(0, held.begin, held.size()));
  }
  const bool one = positions.size() == 1;
  return RotaryFunction::apply(x, one ? cosines.front() : at::cat(cosines),
                               one ? sines.front() : at::cat(sines), 1.0);
}

void Rotary::need(std::int64_t positions, const at::Device& device) {
  const std::int64_t held = cosines_.defined() ? cosines_.size(0) : 0;
  if (positions > held) {
    // At least doubles the tables, so that text generated token by token does not compute them for
    // each token.
    const std::int64_t wanted = std::min(std::max(positions, 2 * held), max_positions_);
    const auto cosines = at::empty({wanted, half_}, at::TensorOptions().dtype(at::kFloat));
    const auto sines = at::empty_like(cosines);
    auto* cosine = cosines.data_ptr<float>();
    auto* sine = sines.data_ptr<float>();
    for (std::int64_t i = 0; i < half_; ++i) {
      // Angles are rounded to float, as in the programs that these models were trained with.
      // Cosines are computed from that in double, which gives the same floats on every machine.
      const auto frequency = static_cast<float>(
          std::pow(theta_, -static_cast<double>(i) / static_cast<double>(half_)));
      for (std::int64_t position = 0; position < wanted; ++position) {
        const auto angle = static_cast<double>(static_cast<float>(position) * frequency);
        cosine[position * half_ + i] = static_cast<float>(std::cos(angle));
        sine[position * half_ + i] = static_cast<float>(std::sin(angle));
      }
    }
    cosines_ = cosines.to(device);
    sines_ = sines.to(device);
  } else if (cosines_.device() != device) {
    cosines_ = cosines_.to(device);
    sines_ = sines_.to(device);
  }
}

}  // namespace lockstep::nn
