// A user's module, as the header of the layers shows it.
#pragma once

#include "against_whole.h"

namespace lockstep::nn {

struct ParallelMLP : torch::nn::Module {
  ParallelMLP(std::int64_t hidden, std::int64_t inner)
      : gate_proj(register_module("gate_proj", ColumnParallelLinear(hidden, inner))),
        down_proj(register_module("down_proj", RowParallelLinear(inner, hidden))) {}

  at::Tensor forward(const at::Tensor& x) { return down_proj(at::silu(gate_proj(x))); }

  ColumnParallelLinear gate_proj;
  RowParallelLinear down_proj;
};

}  // namespace lockstep::nn
