// Uses LibTorch and the part that stands on it.
#include <cstdio>
#include <string>

#include <ATen/ATen.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/comm/scalar_type.h>

int main() {
  using namespace lockstep;
  const at::Tensor tensor = at::ones({2, 3}, at::kDouble);
  const std::string dtype = comm::name(comm::dtype_of(tensor.scalar_type()));
  std::printf("%s, sum %g\n", dtype.c_str(), tensor.sum().item<double>());
  return dtype == "float64" && comm::GroupInfo{}.global_ranks.size() == 1 ? 0 : 1;
}
