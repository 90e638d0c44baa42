// The clock of every deadline: monotonic time, without the time in which this process was stopped.
#pragma once

#include <chrono>

namespace lockstep {

using std::chrono::milliseconds;

// A clock as std::chrono has them. It is that of this process: times of two processes can be
// compared only as spans. Every function may be called from any thread.
//
// A host's wall clock may be set, and differs between hosts: nothing here reads it.
class Clock {
 public:
  using duration = std::chrono::nanoseconds;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<Clock>;
  static constexpr bool is_steady = true;

  // Tens of nanoseconds. The same as std::chrono::steady_clock::now() until stops are left out.
  static time_point now() noexcept;

  // From now on, time in which this process stands still does not count: Ctrl-Z, SIGSTOP, a
  // debugger, a frozen container or virtual machine. The ranks of a job may be stopped together for
  // an hour, and none of them then takes the others for missing. Of each stop at most half a second
  // counts. A thread that sleeps notices stops; it lives as long as the process. A forked child
  // counts all time again until it calls this itself.
  static void leave_out_stops();
};

}  // namespace lockstep
