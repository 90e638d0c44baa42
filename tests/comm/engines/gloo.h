// A group over Gloo, for tests.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/comm/world/backends.h>

#include "ranks.h"

namespace lockstep::comm::backends {

inline std::shared_ptr<Communicator> gloo(const JobStore& job, int rank, int size,
                                          milliseconds timeout = milliseconds(20'000),
                                          LedgerMode mode = LedgerMode::automatic) {
  return make_group("gloo", group_info("world", rank, size),
                    {.store = job.connect(), .timeout = timeout, .ledger = mode});
}

class Gloo : public testing::Test {
 protected:
  void SetUp() override {
    if (!testing::Value(available_backends(), testing::Contains("gloo")))
      GTEST_SKIP() << "this build has no gloo";
  }
  JobStore job_;
};

}  // namespace lockstep::comm::backends
