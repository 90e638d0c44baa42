// A point in time by which a wait must end, on a clock that no setting of the host's time, and no
// stop of this process, moves.
#pragma once

#include <algorithm>

#include <lockstep/base/clock.h>

namespace lockstep {

class Deadline {
 public:
  explicit Deadline(Clock::time_point at) : Deadline(Clock::now(), at) {}

  // Spans longer than a century saturate, so that milliseconds::max() means "never"; negative ones
  // have passed already. Compared in the span's own unit: as nanoseconds it would overflow.
  template <typename Rep, typename Period>
  static Deadline after(std::chrono::duration<Rep, Period> span) {
    constexpr std::chrono::hours longest(24 * 365 * 100);
    const auto now = Clock::now();
    if (span <= span.zero()) return Deadline(now, now);
    if (span > longest) return Deadline(now, now + longest);
    return Deadline(now, now + std::chrono::duration_cast<Clock::duration>(span));
  }

  // Without a look at the clock.
  static Deadline never() {
    return Deadline(Clock::time_point(), Clock::time_point(Clock::duration::max() / 2));
  }

  Clock::time_point at() const { return at_; }
  bool passed() const { return Clock::now() >= at_; }

  // Zero once passed.
  Clock::duration remaining() const {
    return std::max(at_ - Clock::now(), Clock::duration::zero());
  }

  // Milliseconds left for poll(2), never more than `slice` and rounded up, so that a wait does not
  // turn into a busy loop in its last millisecond.
  int poll_timeout(milliseconds slice = milliseconds(1000)) const {
    const auto left = std::chrono::ceil<milliseconds>(remaining());
    return static_cast<int>(std::min(left, slice).count());
  }

  // The whole span this deadline was made for, for messages ("waited 5.0 s").
  double span_seconds() const { return std::chrono::duration<double>(at_ - start_).count(); }

 private:
  Deadline(Clock::time_point start, Clock::time_point at) : start_(start), at_(at) {}

  Clock::time_point start_;
  Clock::time_point at_;
};

}  // namespace lockstep
