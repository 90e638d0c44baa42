// Reductions as c10d names them.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <lockstep/comm/engines/reduction.h>

namespace lockstep::comm::engines {

inline c10d::ReduceOp c10d_op(BasicOp op) {
  switch (op) {
    case BasicOp::min: return c10d::ReduceOp::MIN;
    case BasicOp::max: return c10d::ReduceOp::MAX;
    case BasicOp::sum: break;
  }
  return c10d::ReduceOp::SUM;
}

}  // namespace lockstep::comm::engines
