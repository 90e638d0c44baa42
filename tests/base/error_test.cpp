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

TEST(CommError, GivesTheJobsRanksOfAGroup) {
  const CommError error({.fault = Fault::timeout,
                         .operation = "barrier",
                         .group = "tp",
                         .sequence = 3,
                         .ranks = {1},
                         .explanation = "Rank 0 waited 2.0 s for rank 1.",
                         .found_by = 0,
                         .global_ranks = {4, 5}});
  EXPECT_STREQ(
      error.what(),
      "barrier (call #3) in group 'tp' failed: timeout of rank 1 (job rank 5). Rank 0 "
      "waited 2.0 s for rank 1. (Found by rank 0 (job rank 4).) (Ranks 0 and 1 of 'tp' are "
      "job ranks 4 and 5.)");
  EXPECT_THAT(error.global_ranks(), ::testing::ElementsAre(5));
  const CommError descending(
      {.group = "odd", .ranks = {0, 2}, .explanation = "So.", .global_ranks = {9, 7, 5}});
  EXPECT_STREQ(descending.what(),
               "communication in group 'odd' failed: aborted by ranks 0 and 2 (job ranks 9 and 5). "
               "So. (Ranks 0-2 of 'odd' are job ranks 9, 7 and 5.)");
  EXPECT_THAT(descending.global_ranks(), ::testing::ElementsAre(5, 9));
}

TEST(CommError, SaysNothingOfTheJobWhereTheNumbersAreTheSame) {
  const CommError error(
      {.group = "world", .ranks = {1}, .explanation = "So.", .global_ranks = {0, 1, 2}});
  EXPECT_STREQ(error.what(), "communication in group 'world' failed: aborted by rank 1. So.");
  EXPECT_THAT(error.global_ranks(), ::testing::ElementsAre(1));
  // If nobody gave the mapping, or a peer's is wrong, the numbers stay as they are.
  EXPECT_THAT(CommError({.ranks = {7}}).global_ranks(), ::testing::ElementsAre(7));
  EXPECT_THAT(CommError({.ranks = {-1, 9}, .global_ranks = {3, 4}}).global_ranks(),
              ::testing::ElementsAre(-1, 9));
}

TEST(CommError, LargeGroupsHaveARuleOrNothing) {
  std::vector<int> strided;
  for (int rank = 0; rank < 64; ++rank) strided.push_back(3 + 8 * rank);
  const auto text = [](std::vector<int> global_ranks) {
    return std::string(CommError({.group = "dp",
                                  .ranks = {2},
                                  .explanation = "So.",
                                  .global_ranks = std::move(global_ranks)})
                           .what());
  };
  EXPECT_THAT(text(strided), HasSubstr("by rank 2 (job rank 19). So. (Rank r of 'dp' is job rank 3 "
                                       "+ 8 r.)"));
  std::swap(strided[5], strided[6]);
  EXPECT_THAT(text(strided), ::testing::EndsWith("by rank 2 (job rank 19). So."));
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
