#include <lockstep/parallel/shard/cpu_offload.h>

#include <lockstep/base/error.h>

namespace lockstep::shard {

void check(const CPUOffload& offload) {
  if (offload.offload_params && !offload.offload_optimizer)
    throw UsageError(
        "parameters are to be offloaded to the host's memory and the optimizer is not, "
        "which would bring them back for every step: set offload_optimizer as well");
}

}  // namespace lockstep::shard
