#include <lockstep/nn/rotary.h>

#include <algorithm>
#include <cmath>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <lockstep/base/error.h>

namespace lockstep::nn {

namespace {

at::Tensor turned(const at::Tensor& x, const at::Tensor& cosines, const at::Tensor& sines) {
  const auto half = x.size(-1) / 2;
  const auto a = x.narrow(-1, 0, half);
  const auto b = x.narrow(-1, half, half);
  return at::cat({a * cosines - b * sines, b * cosines + a * sines}, -1).to(x.scalar_type());
}

// Backward turns the other way; nothing but the tables is kept for it.
class RotaryFunction : public torch::autograd::Function<RotaryFunction> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& cosines, const at::Tensor& sines) {
    ctx->save_for_backward({cosines, sines});
    return turned(x, cosines, sines);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& gradients) {
    const auto tables = ctx->get_saved_variables();
    return {RotaryFunction::apply(gradients.at(0), tables.at(0), -tables.at(1)), {}, {}};
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
  return positions.size() == 1 ? RotaryFunction::apply(x, cosines.front(), sines.front())
                               : RotaryFunction::apply(x, at::cat(cosines), at::cat(sines));
}

void Rotary::need(std::int64_t positions, const at::Device& device) {
  const std::int64_t held = cosines_.defined() ? cosines_.size(0) : 0;
  if (positions > held) {
    // Twice as many as there were: a text that grows token by token does not compute them anew for
    // each.
    const std::int64_t wanted = std::min(std::max(positions, 2 * held), max_positions_);
    const auto cosines = at::empty({wanted, half_}, at::TensorOptions().dtype(at::kFloat));
    const auto sines = at::empty_like(cosines);
    auto* cosine = cosines.data_ptr<float>();
    auto* sine = sines.data_ptr<float>();
    for (std::int64_t i = 0; i < half_; ++i) {
      // Angles are rounded to float, as in the programs these models were trained with; their
      // cosines are taken of that in double, which gives the same floats on every machine.
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
