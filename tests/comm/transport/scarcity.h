// Memory that runs out when a test says so.
#pragma once

namespace lockstep::comm::testing {

// While one lives, this many allocations of its thread succeed, and no more.
class Scarcity {
 public:
  explicit Scarcity(int allowed);
  ~Scarcity();
  Scarcity(const Scarcity&) = delete;
  Scarcity& operator=(const Scarcity&) = delete;

  // Whether none is left.
  static bool felt();
};

}  // namespace lockstep::comm::testing
