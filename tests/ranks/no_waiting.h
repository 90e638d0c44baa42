// Notices where the host waits for a GPU.
#pragma once

#if defined(LOCKSTEP_HAVE_CUDA)
#include <ATen/ATen.h>
#include <c10/cuda/CUDAFunctions.h>

namespace lockstep::ranks {

// While it lives, operators that wait for the GPU, and waits for a stream, throw on every thread of
// this process. Waits for events do not.
class NoWaiting {
 public:
  NoWaiting() { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_ERROR); }
  ~NoWaiting() {
    c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED);
  }
  NoWaiting(const NoWaiting&) = delete;
  NoWaiting& operator=(const NoWaiting&) = delete;

  // Whether a wait is noticed at all.
  bool notices() const {
    try {
      at::zeros({1}, at::kCUDA).item<float>();
    } catch (const c10::Error&) {
      return true;
    }
    return false;
  }
};

}  // namespace lockstep::ranks
#endif
