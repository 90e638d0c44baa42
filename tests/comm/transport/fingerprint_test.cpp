// What errors say of a call.
#include <lockstep/comm/operations/operation.h>

#include <string>

#include <gtest/gtest.h>

namespace lockstep::comm {
namespace {

constexpr Fingerprint kGather{.sequence = 7,
                              .count = 96,
                              .root = 1'879'048'193,
                              .operation = Operation::all_gather,
                              .dtype = DType::float32,
                              .tensors = 2};

TEST(Fingerprint, NamesTheCallAndNotTheNumberOfItsSubject) {
  EXPECT_EQ(kGather.text(), "all_gather #7 (96 float32 in 2 tensors)");
  Fingerprint broadcast = kGather;
  broadcast.operation = Operation::broadcast;
  broadcast.root = 3;
  EXPECT_EQ(broadcast.text_with_subject(), "broadcast #7 (96 float32 from root 3 in 2 tensors)");
}

TEST(Fingerprint, SaysTheSubjectWhereRanksDiffer) {
  EXPECT_EQ(kGather.text_with_subject(),
            "all_gather #7 (96 float32, subject 1879048193 in 2 tensors)");
  Fingerprint none = kGather;
  none.root = -1;
  EXPECT_EQ(none.text_with_subject(), none.text());
  const std::string message = "Rank 0 called " + kGather.text_with_subject() + ", rank 1 none";
  EXPECT_EQ(name_subjects(message, [](std::int32_t) { return ""; }),
            "Rank 0 called " + kGather.text() + ", rank 1 none");
  EXPECT_EQ(name_subjects(
                message + ", subject , subject 5",
                [](std::int32_t subject) { return subject == 5 ? "unit 'head'" : "the first"; }),
            "Rank 0 called all_gather #7 (96 float32, the first in 2 tensors), rank 1 none, "
            "subject , unit 'head'");
}

}  // namespace
}  // namespace lockstep::comm
