// For jobs that end because a rank has said that a restart would not help.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include <nlohmann/json.hpp>

#include "launched.h"

namespace lockstep::launch::testing {

// Expects that this rank's failure is the last one reported, that no generation was formed after
// it, and that nothing is left.
inline void expect_ended_for_good(const Launched& job, int rank) {
  const auto faults = faults_in(job.error());
  ASSERT_FALSE(faults.empty()) << job.error();
  const auto fault = nlohmann::json::parse(faults.back());
  EXPECT_EQ(fault["rank"], rank);
  EXPECT_EQ(fault["restarted"], false);
  EXPECT_THAT(job.error(), ::testing::HasSubstr("no restart is made: rank " + std::to_string(rank) +
                                                " has said"));
  EXPECT_THAT(job.error(), ::testing::Not(::testing::HasSubstr("generation 1 starts")));
  EXPECT_TRUE(job.all_gone(milliseconds(0)));
}

}  // namespace lockstep::launch::testing
