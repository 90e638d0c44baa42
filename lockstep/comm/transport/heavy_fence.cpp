#include <lockstep/comm/transport/heavy_fence.h>

#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <lockstep/base/error.h>

namespace lockstep::comm {

namespace {

bool membarrier(int command) { return ::syscall(SYS_membarrier, command, 0, 0) == 0; }

}  // namespace

bool take_part_in_heavy_fences() { return membarrier(MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED); }

void heavy_fence() {
  const bool done = membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED);
  if (!done)
    throw UsageError("the system call membarrier worked when this process joined its group, and is "
                     "refused now ({}): allow it in the filter (seccomp) that was set since",
                     std::strerror(errno));
}

}  // namespace lockstep::comm
