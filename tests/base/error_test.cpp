#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/base/error.h>

namespace lockstep {
namespace {

using ::testing::HasSubstr;

TEST(ListRanks, ReadsAsAPersonWouldSayIt) {
  EXPECT_EQ(list_ranks({}), "no rank");
  EXPECT_EQ(list_ranks({3}), "rank 3");
  EXPECT_EQ(list_ranks({0, 1}), "ranks 0 and 1");
  EXPECT_EQ(list_ranks({0, 2, 5}), "ranks 0, 2 and 5");
  EXPECT_EQ(list_ranks({0, 1, 2}), "ranks 0-2");
  EXPECT_EQ(list_ranks({0, 1, 2, 3, 4, 5, 6, 7, 12}), "ranks 0-7 and 12");
  EXPECT_EQ(list_ranks({1, 3, 4, 6, 7, 8, 10}), "ranks 1, 3, 4, 6-8 and 10");
}

TEST(CommError, NamesEverythingItKnows) {
  const CommError error({.fault = Fault::timeout,
                         .operation = "all_reduce",
                         .group = "tp",
                         .sequence = 17,
                         .ranks = {1, 3},
                         .explanation = "They did not arrive within 5.0 s."});
  EXPECT_STREQ(error.what(),
               "all_reduce (call #17) in group 'tp' failed: timeout of ranks 1 and 3. They did not "
               "arrive within 5.0 s.");
  EXPECT_EQ(error.fault(), Fault::timeout);
  EXPECT_THAT(error.ranks(), ::testing::ElementsAre(1, 3));
  EXPECT_EQ(error.details().sequence, 17u);
}

TEST(CommError, LeavesOutWhatItDoesNotKnow) {
  EXPECT_STREQ(CommError({.fault = Fault::peer_lost}).what(), "communication failed: peer lost");
  EXPECT_STREQ(CommError({.fault = Fault::refused, .operation = "handshake"}).what(),
               "handshake failed: refused");
}

TEST(CommError, EveryFaultHasAName) {
  std::vector<std::string> names;
  for (const Fault fault : {Fault::timeout, Fault::peer_lost, Fault::mismatch, Fault::aborted,
                            Fault::corrupted, Fault::refused, Fault::engine})
    names.emplace_back(fault_name(fault));
  EXPECT_THAT(names, ::testing::ElementsAre("timeout", "peer lost", "mismatch", "aborted",
                                            "corrupted", "refused", "engine"));
}

TEST(Errors, AreOneFamily) {
  EXPECT_THROW(throw UsageError("{} of {}", 1, 2), Error);
  EXPECT_THROW(throw CommError({}), Error);
  EXPECT_THROW(throw InternalError("bug"), Error);
  try {
    throw UsageError("port {} is taken by '{}'", 29500, "{}");
  } catch (const std::exception& error) {
    EXPECT_STREQ(error.what(), "port 29500 is taken by '{}'");
  }
}

TEST(Check, SaysWhereAndWhy) {
  LOCKSTEP_CHECK(1 + 1 == 2);
  try {
    LOCKSTEP_CHECK(1 + 1 == 3, "sum is {}", 2);
    FAIL() << "nothing was thrown";
  } catch (const InternalError& error) {
    EXPECT_THAT(error.what(), HasSubstr("1 + 1 == 3"));
    EXPECT_THAT(error.what(), HasSubstr("error_test.cpp"));
    EXPECT_THAT(error.what(), HasSubstr("sum is 2"));
  }
}

}  // namespace
}  // namespace lockstep
