#include <lockstep/optim/parts.h>

#include <ATen/ATen.h>

#include <lockstep/optim/kernels/block_codes.h>
#include <lockstep/optim/sum_of_squares.h>

namespace lockstep::optim {

float BlockEdges::joined(float one, float other) { return larger_scale(one, other); }

std::vector<std::int64_t> WholeParts::whole_shape(const std::string& /*name*/,
                                                  const at::Tensor& part) const {
  return part.sizes().vec();
}

std::vector<double> WholeParts::sums_of_squares(const std::vector<NamedTensor>& tensors) {
  std::vector<at::Tensor> values;
  for (const NamedTensor& one : tensors) values.push_back(one.tensor);
  const at::Tensor blocks = optim::sums_of_squares(values).cpu();
  std::vector<double> sums;
  std::int64_t begin = 0;
  for (const at::Tensor& one : values) {
    const std::int64_t end = begin + num_norm_blocks(one);
    sums.push_back(add_in_order(blocks, {{{begin, end}}}).item<double>());
    begin = end;
  }
  return sums;
}

void WholeParts::compute_whole(const std::vector<WholeMatrices::Matrix>& matrices,
                               const WholeMatrices& work) {
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    at::Tensor whole = work.take(i);
    if (device_) whole = whole.to(*device_);
    work.give(i, work.compute(i, std::move(whole)).reshape({-1}));
  }
}

}  // namespace lockstep::optim
