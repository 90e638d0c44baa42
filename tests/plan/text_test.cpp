// Numbers in the forms in which people read and write them.
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/base/error.h>
#include <lockstep/plan/text.h>

namespace lockstep::plan {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::int64_t kGiB = std::int64_t{1} << 30;

TEST(BytesText, IsReadAsPeopleWriteIt) {
  for (const auto& [text, bytes] :
       std::vector<std::pair<const char*, std::int64_t>>{{"80GiB", 80 * kGiB},
                                                         {"80 GiB", 80 * kGiB},
                                                         {"80g", 80 * kGiB},
                                                         {"24GB", 24'000'000'000},
                                                         {"0.5GiB", kGiB / 2},
                                                         {"512MiB", kGiB / 2},
                                                         {"1.5T", 1536 * kGiB},
                                                         {"1e9", 1'000'000'000}})
    EXPECT_EQ(parse_bytes(text, "--device-memory"), bytes) << text;
  for (const char* wrong :
       {"", "GiB", "-1GiB", "0", "80GiBs", "80 gigs", "nan", "inf", "1e30", "8X"})
    EXPECT_THROW(parse_bytes(wrong, "--device-memory"), UsageError) << wrong;
  EXPECT_EQ(bytes_text(1.5 * static_cast<double>(kGiB)), "1.5 GiB");
  EXPECT_EQ(bytes_text(12), "12 bytes");
}

std::vector<MemoryRow> rows() {
  std::vector<MemoryRow> all;
  for (const int ranks : {1, 1024})
    for (const StrategyTraits& one : kStrategies)
      all.push_back({.num_ranks = ranks,
                     .strategy = one.strategy,
                     .estimate = {.weights = 9999 * kGiB,
                                  .gradients = 9999 * kGiB,
                                  .optimizer = 9999 * kGiB,
                                  .gathered = 99 * kGiB,
                                  .activations = 9999 * kGiB,
                                  .peak = 9999 * kGiB},
                     .verdict = "tight"});
  return all;
}

TEST(MemoryTable, FitsATerminal) {
  std::istringstream lines(memory_table(rows()));
  int count = 0;
  for (std::string line; std::getline(lines, line); ++count) EXPECT_LE(line.size(), 100u) << line;
  EXPECT_EQ(count, 2 + 5 + 1 + 5);
}

TEST(MemoryTable, LeavesOutWhatIsNothing) {
  std::vector<MemoryRow> some = rows();
  EXPECT_THAT(memory_table(some),
              AllOf(HasSubstr("in flight"), HasSubstr("fits"), Not(HasSubstr("buffers")),
                    Not(HasSubstr("on host")), HasSubstr("9999.00"), HasSubstr("GiB")));
  for (MemoryRow& row : some)
    row = {.estimate = {.weights = 1 << 20, .buffers = 1 << 20, .peak = 2 << 20}};
  EXPECT_THAT(memory_table(some), AllOf(HasSubstr("MiB"), HasSubstr("buffers"), HasSubstr("1.00"),
                                        Not(HasSubstr("fits")), Not(HasSubstr("in flight"))));
}

}  // namespace
}  // namespace lockstep::plan
