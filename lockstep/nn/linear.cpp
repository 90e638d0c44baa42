#include <lockstep/nn/linear.h>

#include <ATen/ATen.h>

namespace lockstep::nn {

LinearImpl::LinearImpl(std::int64_t in, std::int64_t out, Bias bias)
    : weight(register_parameter("weight", at::empty({out, in}))) {
  if (bias == Bias::added) this->bias = register_parameter("bias", at::empty({out}));
}

at::Tensor LinearImpl::forward(const at::Tensor& x) { return at::linear(x, weight, bias); }

EmbeddingImpl::EmbeddingImpl(std::int64_t rows, std::int64_t width)
    : weight(register_parameter("weight", at::empty({rows, width}))) {}

at::Tensor EmbeddingImpl::forward(const at::Tensor& tokens) {
  return at::embedding(weight, tokens);
}

}  // namespace lockstep::nn
