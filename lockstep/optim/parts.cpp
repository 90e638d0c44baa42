#include <lockstep/optim/parts.h>

#include <ATen/ATen.h>

#include <lockstep/optim/sum_of_squares.h>

namespace lockstep::optim {

std::vector<double> sums_of_squares_of_whole(const std::vector<NamedTensor>& tensors) {
  std::vector<at::Tensor> values;
  for (const NamedTensor& one : tensors) values.push_back(one.tensor);
  const at::Tensor blocks = sums_of_squares(values).cpu();
  std::vector<double> sums;
  std::int64_t begin = 0;
  for (const at::Tensor& one : values) {
    const std::int64_t end = begin + num_norm_blocks(one);
    sums.push_back(add_in_order(blocks, {{{begin, end}}}).item<double>());
    begin = end;
  }
  return sums;
}

}  // namespace lockstep::optim
