// Ctrl-C, and the signals that mean the same: a wish to stop, heard between two steps.
#pragma once

#include <array>
#include <csignal>

namespace lockstep::train {

// While one of these lives, the first SIGINT, SIGTERM or SIGHUP only sets a flag; a second one, of
// any kind, ends the process at once. A SIGHUP that was ignored before (nohup) stays so. Of one
// thread of a process; one within the life of another shares its request.
class StopRequest {
 public:
  StopRequest();
  ~StopRequest();
  StopRequest(const StopRequest&) = delete;
  StopRequest& operator=(const StopRequest&) = delete;

  bool made() const;

  // The signal that made the latest request of this process; 0 where there was none. Stays when the
  // object is gone.
  static int latest_signal();

 private:
  bool outermost_;
  std::array<struct sigaction, 3> before_{};
};

}  // namespace lockstep::train
