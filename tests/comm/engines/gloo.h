// A group over Gloo, for tests.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/comm/engines/engines.h>

#include "ranks.h"

namespace lockstep::comm::engines {

inline std::shared_ptr<Communicator> gloo(const Job& job, int rank, int size,
                                          milliseconds timeout = milliseconds(20'000),
                                          LedgerMode mode = LedgerMode::automatic) {
  return make_engine("gloo", group_info("world", rank, size),
                     {.store = job.connect(), .timeout = timeout, .ledger = mode});
}

class Gloo : public testing::Test {
 protected:
  void SetUp() override {
    if (!testing::Value(available_engines(), testing::Contains("gloo")))
      GTEST_SKIP() << "this build has no gloo";
  }
  Job job_;
};

}  // namespace lockstep::comm::engines
