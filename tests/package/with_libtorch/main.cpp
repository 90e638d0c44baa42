// Uses LibTorch and the parts of Lockstep that need it.
#include <cmath>
#include <cstdio>
#include <string>

#include <ATen/ATen.h>

#include <lockstep/comm/communicator.h>

#include "own_model.h"

int main() {
  using namespace lockstep;
  const at::Tensor tensor = at::ones({2, 3}, at::kDouble);
  const std::string dtype = comm::name(comm::dtype_of(tensor.scalar_type()));
  const double slope = trained_slope();
  std::printf("%s, sum %g, slope %g\n", dtype.c_str(), tensor.sum().item<double>(), slope);
  const bool learnt = std::abs(slope - 3) < 0.3;
  return dtype == "float64" && comm::GroupInfo{}.global_ranks.size() == 1 && learnt ? 0 : 1;
}
