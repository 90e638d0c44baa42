// Makes memory run out when a test wants it.
#pragma once

namespace lockstep::comm::testing {

// While one lives, only this many allocations of its thread succeed.
class Scarcity {
 public:
  explicit Scarcity(int allowed);
  ~Scarcity();
  Scarcity(const Scarcity&) = delete;
  Scarcity& operator=(const Scarcity&) = delete;

  // Whether all allowed allocations have been used.
  static bool felt();
};

}  // namespace lockstep::comm::testing
