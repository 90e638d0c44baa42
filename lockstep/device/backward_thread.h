// The thread that called backward(), known to the threads on which autograd runs the pass.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include <c10/util/ThreadLocalDebugInfo.h>

#include <lockstep/base/thread_number.h>

namespace lockstep::device {

// While it lives, threads to which LibTorch hands this thread's state know whom they work for. A
// backward pass that begins meanwhile hands it to autograd's threads for devices. Within another,
// the outer one's thread counts.
class [[nodiscard]] BackwardThread {
 public:
  BackwardThread();
  BackwardThread(const BackwardThread&) = delete;
  BackwardThread& operator=(const BackwardThread&) = delete;

 private:
  c10::DebugInfoGuard guard_;
};

// While it lives, a thread of autograd's has the number of the thread that called backward(), which
// waits for it; any other thread keeps its own.
class [[nodiscard]] AsBackwardThread {
 public:
  AsBackwardThread();

 private:
  std::optional<ThreadNumberScope> number_;
};

}  // namespace lockstep::device
