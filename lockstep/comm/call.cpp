#include <lockstep/comm/call.h>

#include <lockstep/base/error.h>

namespace lockstep::comm {

void check_divisor(const at::Tensor& divisor, Operation operation, ReduceOp op,
                   c10::Device device) {
  if (op != ReduceOp::mean)
    throw UsageError("{}: a divisor is for means, this is a {}", name(operation), name(op));
  if (!divisor.device().is_cpu() || divisor.scalar_type() != at::kDouble || divisor.numel() != 1)
    throw UsageError("{}: a divisor is one float64 on the CPU, this one is {} {} on {}",
                     name(operation), divisor.numel(), c10::toString(divisor.scalar_type()),
                     divisor.device().str());
  if (!device.is_cpu())
    throw UsageError("{}: a divisor is for tensors on the CPU, these are on {}: take the sum and "
                     "divide it",
                     name(operation), device.str());
}

double divisor_of(ReduceOp op, const at::Tensor& divisor, int num_ranks) {
  if (op != ReduceOp::mean) return 1;
  if (!divisor.defined()) return num_ranks;
  const double number = *static_cast<const double*>(divisor.data_ptr());
  return number == 0 ? 1 : number;
}

}  // namespace lockstep::comm
