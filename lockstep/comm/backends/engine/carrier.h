// Builds the reductions that engines lack out of those that every engine has: sums, minima and
// maxima of float32, float64, int32, int64 and uint8.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/comm/operations/operation.h>

namespace lockstep::comm::backends {

// Every engine can do these.
enum class BasicOp : std::uint8_t { sum, min, max };

// Views a contiguous tensor's memory as a flat tensor without autograd, version counter or dispatch
// keys. Keeps the tensor alive.
at::Tensor flat_alias(const at::Tensor& tensor);
// The same memory as a flat tensor of bytes.
at::Tensor byte_alias(const at::Tensor& tensor);

// The elements of a call in the form in which the engine reduces them:
//   float16 and bfloat16   as float32
//   bool                   as uint8, "or" as max and "and" as min
//   min and max of floats  as integers in the same order, in which NaN comes last (first for min):
//                          engines lose NaNs, or keep them by luck
//   several tensors        one after the other
struct Carrier {
  at::Tensor tensor;  // flat; the caller's own memory where no conversion was needed
  BasicOp op = BasicOp::sum;
};

Carrier carry(const std::vector<at::Tensor>& tensors, ReduceOp op);

// Writes the reduced elements back; a mean is divided here.
void restore(const Carrier& reduced, ReduceOp op, double divisor,
             const std::vector<at::Tensor>& tensors);

// output ← the reduction of `parts`, added in their order; a mean is divided here, too.
void reduce_locally(const std::vector<at::Tensor>& parts, ReduceOp op, double divisor,
                    const at::Tensor& output);

}  // namespace lockstep::comm::backends
