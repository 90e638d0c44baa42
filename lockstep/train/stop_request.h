// Ctrl-C, and the signals that mean the same: a wish to stop, heard between two steps.
#pragma once

#include <csignal>

namespace lockstep::train {

// While one of these lives, the first SIGINT or SIGTERM only sets a flag; a second one, of either
// kind, ends the process at once. One at a time in a process.
class StopRequest {
 public:
  StopRequest();
  ~StopRequest();
  StopRequest(const StopRequest&) = delete;
  StopRequest& operator=(const StopRequest&) = delete;

  bool made() const;

 private:
  struct sigaction interrupt_before_ {};
  struct sigaction terminate_before_ {};
};

}  // namespace lockstep::train
