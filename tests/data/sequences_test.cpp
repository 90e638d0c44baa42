#include <lockstep/data/tokens/sequences.h>

#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "../base/errors.h"
#include "../base/files.h"
#include "token_files.h"

namespace lockstep::data {
namespace {

using lockstep::testing::TemporaryFolder;
using ::testing::AllOf;
using ::testing::HasSubstr;

// A stream of the tokens 0, 1, 2, …
class Sequences : public ::testing::Test {
 protected:
  std::shared_ptr<const TokenStream> stream(int tokens) {
    std::vector<std::uint16_t> values(static_cast<std::size_t>(tokens));
    std::iota(values.begin(), values.end(), 0);
    const auto path = folder_ / (std::to_string(tokens) + ".bin");
    lockstep::testing::write_file(path, bytes_of(values));
    return std::make_shared<TokenStream>(TokenStream::open(std::vector{path}));
  }

  static std::vector<std::int64_t> input(const SequenceSet& set, std::int64_t index) {
    std::vector<std::int64_t> tokens(static_cast<std::size_t>(set.length()));
    set.copy_input(index, tokens);
    return tokens;
  }
  static std::vector<std::int64_t> target(const SequenceSet& set, std::int64_t index) {
    std::vector<std::int64_t> tokens(static_cast<std::size_t>(set.length()));
    set.copy_target(index, tokens);
    return tokens;
  }

  const TemporaryFolder folder_;
};

TEST_F(Sequences, FollowEachOtherWithTargetsShiftedByOne) {
  for (const int tokens : {2, 5, 9, 10, 12, 13, 100}) {
    for (const int length : {1, 2, 3, 4, 12}) {
      if (tokens <= length) continue;
      const SequenceSet set(stream(tokens), length);
      ASSERT_EQ(set.size(), (tokens - 1) / length);
      for (std::int64_t k = 0; k < set.size(); ++k) {
        EXPECT_EQ(input(set, k), count_up(length, k * length));
        EXPECT_EQ(target(set, k), count_up(length, k * length + 1));
      }
    }
  }
}

TEST_F(Sequences, TooShort) {
  EXPECT_THAT(usage_error([&] { SequenceSet(stream(8), 8); }),
              AllOf(HasSubstr("8.bin' has 8 tokens, but one sequence of length 8 takes 9"),
                    HasSubstr("shorter sequence length")));
  EXPECT_EQ(SequenceSet(stream(9), 8).size(), 1);
  EXPECT_THAT(usage_error([&] { SequenceSet(stream(8), 0); }), HasSubstr("of 0 tokens"));
  EXPECT_THAT(
      usage_error([&] { SequenceSet(stream(8), std::numeric_limits<std::int64_t>::max()); }),
      HasSubstr("takes 9223372036854775808"));
}

TEST_F(Sequences, AskedForWhatIsNotThere) {
  const SequenceSet set(stream(9), 4);
  EXPECT_THAT(usage_error([&] { input(set, 2); }), HasSubstr("sequence 2 of 2"));
  EXPECT_THAT(usage_error([&] { target(set, -1); }), HasSubstr("sequence -1 of 2"));
  std::vector<std::int64_t> five(5);
  EXPECT_THAT(usage_error([&] { set.copy_input(0, five); }), HasSubstr("5 tokens"));
}

TEST_F(Sequences, ValidationIsTheTail) {
  const SequenceSet set(stream(102), 10);
  const auto [train, validation] = set.split(0.3);
  ASSERT_EQ(train.size(), 7);
  ASSERT_EQ(validation.size(), 3);
  for (std::int64_t k = 0; k < 7; ++k) EXPECT_EQ(input(train, k), input(set, k));
  for (std::int64_t k = 0; k < 3; ++k) {
    EXPECT_EQ(input(validation, k), input(set, 7 + k));
    EXPECT_EQ(target(validation, k), target(set, 7 + k));
  }
  // The last target of training is before the first target of validation.
  EXPECT_EQ(target(train, 6).back() + 1, target(validation, 0).front());
  EXPECT_THAT(usage_error([&train = train] { input(train, 7); }), HasSubstr("sequence 7 of 7"));
  // A part can be divided again.
  EXPECT_EQ(input(validation.split(0.5).validation, 0), input(set, 8));
}

TEST_F(Sequences, SplitsThatLeaveNothing) {
  const SequenceSet set(stream(41), 4);
  EXPECT_EQ(set.split(0.05).validation.size(), 1);
  EXPECT_THAT(usage_error([&] { set.split(0.04); }),
              HasSubstr("of 10 sequences of 4 tokens leaves 0 for validation and 10 for training"));
  EXPECT_THAT(usage_error([&] { set.split(0.96); }), HasSubstr("leaves 10 for validation and 0"));
  for (const double fraction : {0.0, 1.0, -0.5, 2.0, std::numeric_limits<double>::quiet_NaN()})
    EXPECT_THAT(usage_error([&] { set.split(fraction); }), HasSubstr("between 0 and 1"));
}

}  // namespace
}  // namespace lockstep::data
