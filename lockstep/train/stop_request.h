// Requests to stop a run, by Ctrl-C or a signal of the same meaning; the run stops between two
// steps.
#pragma once

#include <array>
#include <csignal>

namespace lockstep::train {

// While a StopRequest lives, the first SIGINT, SIGTERM or SIGHUP only sets a flag; a second signal,
// of any of these kinds, ends the process at once. A SIGHUP that was ignored before (nohup) stays
// ignored. One thread of a process makes these objects; an object made within the life of another
// shares its request.
class StopRequest {
 public:
  StopRequest();
  ~StopRequest();
  StopRequest(const StopRequest&) = delete;
  StopRequest& operator=(const StopRequest&) = delete;

  bool made() const;

  // The signal of this process's latest request; 0 if there was none. It is kept when the object is
  // gone.
  static int latest_signal();

 private:
  bool outermost_;
  std::array<struct sigaction, 3> before_{};
};

}  // namespace lockstep::train
