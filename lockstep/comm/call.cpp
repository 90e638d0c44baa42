#include <lockstep/comm/call.h>

namespace lockstep::comm {

double divisor_of(const Call& call, int num_ranks) {
  if (call.fingerprint.reduce_op != ReduceOp::mean) return 1;
  if (!call.divisor.defined()) return num_ranks;
  const double divisor = *static_cast<const double*>(call.divisor.data_ptr());
  return divisor == 0 ? 1 : divisor;
}

}  // namespace lockstep::comm
