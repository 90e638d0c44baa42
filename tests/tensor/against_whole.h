// Compares a module whose layers are cut with the same module whole, which every rank computes for
// itself.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/module.h>
#include <torch/utils.h>

#include <lockstep/mesh/tensors.h>
#include <lockstep/nn/tensor_parallel/tensor_axis.h>
#include <lockstep/nn/tensor_parallel/tensor_parallel.h>

#include "tables.h"

namespace lockstep::nn {

struct Precision {
  at::ScalarType type;
  double tolerance;
  c10::DeviceType device = at::kCPU;

  std::string text() const {
    return fmt::format("{}{}", c10::toString(type), device == at::kCPU ? "" : " on a GPU");
  }
};

inline constexpr Precision kPrecisions[] = {{at::kDouble, 1e-10}, {at::kFloat, 1e-5}};

inline std::shared_ptr<TensorAxis> axis_of(const ranks::Cells& cells,
                                           BetweenLayers between = BetweenLayers::whole) {
  return std::make_shared<TensorAxis>(cells.group(), between);
}

// The largest error, relative to the largest value.
inline void expect_within(ranks::Cells& cells, const at::Tensor& got, const at::Tensor& wanted,
                          double tolerance, const std::string& what) {
  if (!got.defined() || got.sizes() != wanted.sizes())
    return cells.expect(false,
                        fmt::format("{} has the shape {} where {} is right", what,
                                    got.defined() ? c10::str(got.sizes()) : "of nothing at all",
                                    c10::str(wanted.sizes())));
  if (wanted.numel() == 0) return;
  const auto right = wanted.detach().to(at::kDouble);
  const double error = (got.detach().to(at::kDouble) - right).abs().max().item<double>() /
                       std::max(1e-300, right.abs().max().item<double>());
  cells.expect(error <= tolerance, fmt::format("{} is off by {:.3g}", what, error));
}

// Compares, for every parameter, this rank's gradient with its part of the whole one's, and checks
// that the parts come from the whole.
inline void expect_same_gradients(ranks::Cells& cells, const torch::nn::Module& cut,
                                  const torch::nn::Module& whole, double tolerance) {
  const auto parameters = cut.named_parameters();
  const auto parts = cut_parameters(cut);
  for (const auto& item : whole.named_parameters()) {
    const at::Tensor& mine = parameters[item.key()];
    at::Tensor wanted = item.value().grad();
    const std::string what = fmt::format("the gradient of {}", item.key());
    if (!wanted.defined()) {
      cells.expect(!mine.grad().defined(), what + " is there");
      continue;
    }
    const auto part = std::ranges::find(parts, item.key(), &CutParameter::name);
    if (part != parts.end()) {
      cells.expect(part->parameter.is_same(mine), item.key() + " is another tensor");
      wanted = mesh::part_of(wanted, part->placement).reshape(mine.sizes());
    }
    expect_within(cells, mine.grad(), wanted, tolerance, what);
  }
}

// The same module twice; one of them is cut as its layers say.
template <typename Module>
struct Twins {
  Module whole, cut;
};

template <typename Make>
auto make_twins(const Make& make, at::ScalarType type, const std::shared_ptr<TensorAxis>& axis) {
  const auto one = [&] {
    torch::manual_seed(3);
    auto module = make();
    module->to(type);
    return module;
  };
  Twins<decltype(make())> twins{one(), one()};
  cut_parallel_layers(*twins.cut, axis);
  return twins;
}

inline at::Tensor leaf(const at::Tensor& x) { return x.detach().clone().requires_grad_(); }

// This rank's slice of the positions, which are dim 1.
inline at::Tensor slice_of(const at::Tensor& x, const ranks::Cells& cells) {
  const auto part = mesh::part_of(x.size(1), cells.rank(), cells.num_ranks());
  return x.narrow(1, part.begin, part.size()).contiguous();
}

}  // namespace lockstep::nn
