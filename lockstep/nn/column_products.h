// Several products of one input with weights whose outputs are cut over a tensor axis.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/nn/tensor_axis.h>

namespace lockstep::nn {

inline constexpr std::size_t kMostProducts = 3;

// A weight [out, in] and its bias [out], or none.
struct ProductWeights {
  at::Tensor weight;
  at::Tensor bias;
};

// x · weightᵀ + bias of each, kMostProducts at most, of x [..., in] as it lies between layers. What
// the ranks' gradients of x add up to is summed once for all of the products, while the gradients
// of the weights are computed. Keeps nothing but x, as it lies between layers.
std::vector<at::Tensor> column_products(const at::Tensor& x,
                                        const std::vector<ProductWeights>& weights,
                                        const std::shared_ptr<TensorAxis>& axis);

}  // namespace lockstep::nn
