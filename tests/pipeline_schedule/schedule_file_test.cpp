// Writing schedules to files and reading them back, and files that are no schedules.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/parallel/pipeline/schedule/registry.h>
#include <lockstep/parallel/pipeline/schedule/schedule_file.h>

#include "sizes.h"
#include "tests/base/errors.h"
#include "tests/base/files.h"

namespace lockstep::pipeline {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr std::string_view kTwoRanks = R"({
  "format": "lockstep-schedule",
  "version": 1,
  "name": "gpipe",
  "micro_batches": 1,
  "rank_of_stage": [0, 1],
  "ranks": [
    "RG0.0 F0.0 SA0.0 B0.0",
    "RA1.0 F1.0 B1.0 SG1.0"
  ]
}
)";

std::string with(std::string_view part, std::string_view replacement) {
  std::string text(kTwoRanks);
  const auto at = text.find(part);
  EXPECT_NE(at, std::string::npos) << part;
  return text.replace(at, part.size(), replacement);
}

TEST(ActionText, EachKindHasOneSpelling) {
  for (int kind = 0; kind < kNumActionKinds; ++kind) {
    const Action action = {static_cast<ActionKind>(kind), 12, 345};
    EXPECT_EQ(parse_action(to_text(action)), action);
  }
  EXPECT_EQ(to_text({ActionKind::forward, 0, 3}), "F0.3");
  EXPECT_EQ(to_text({ActionKind::receive_gradient, 7, 0}), "RG7.0");
  for (const char* text : {"",      "F",      "F0",     "F0.",           "F.0",   "0.0",   "X0.0",
                           "f0.0",  "F0.0 ",  " F0.0",  "F-1.0",         "F0.-1", "F+1.0", "F00.0",
                           "F0.01", "F0.0.0", "F1e3.0", "F0.1234567890", "FF0.0", ".F0",   "F0x.0"})
    EXPECT_EQ(parse_action(text), std::nullopt) << text;
}

TEST(ScheduleFile, HasALineForEachRank) {
  const Schedule schedule = make_schedule(ScheduleKind::gpipe, {.num_ranks = 2});
  EXPECT_EQ(to_text(schedule), kTwoRanks);
}

TEST(ScheduleFile, ComesBackAsItWas) {
  const lockstep::testing::TemporaryFolder folder;
  for (const ScheduleKind kind : testing::own_kinds) {
    const Schedule schedule = make_schedule(kind, {.num_ranks = 3, .num_micro_batches = 5});
    write_schedule(folder / "schedule.json", schedule);
    EXPECT_EQ(read_schedule(folder / "schedule.json"), schedule) << name_of(kind);
  }
}

TEST(ScheduleFile, NamesTheFileTheRankAndThePlace) {
  struct Case {
    std::string text;
    std::string part;
  };
  for (const auto& [text, part] : std::vector<Case>{
           {"", "plan.json, byte 1: not valid JSON"},
           {std::string(kTwoRanks) + "}", "not valid JSON"},
           {std::string(kTwoRanks) + '\0', "not valid JSON"},
           {"[1]", "not an object"},
           {"[[[1]]]", "nested deeper"},
           {R"({"format": {}})", "nested deeper"},
           {with("\"version\": 1", "\"version\": 2"), "'version' is not 1"},
           {with("lockstep-schedule", "other"), "'format' is not 'lockstep-schedule'"},
           {with("\"micro_batches\": 1", "\"micro_batches\": 0"), "'micro_batches' is not a whole"},
           {with("\"micro_batches\": 1", "\"micro_batches\": 1.5"), "'micro_batches' is not"},
           {with("\"micro_batches\": 1", "\"micro_batches\": 1e99"), "'micro_batches' is not"},
           {with("\"micro_batches\": 1", "\"micro_batches\": 4000000"), "need 8000000 forwards"},
           {with("\"micro_batches\"", "\"batches\""), "the key 'batches' is not known"},
           {with("  \"version\": 1,\n", ""), "the key 'version' is missing"},
           {with("\"version\": 1", "\"version\": 1, \"version\": 1"), "'version' is there twice"},
           {with("[0, 1]", "[0, -1]"), "a rank in 'rank_of_stage' is not a whole number"},
           {with("[0, 1]", "[0, 2]"), "stage 1 is on rank 2"},
           {with("[0, 1]", "\"01\""), "'rank_of_stage' is not an array"},
           {with("gpipe", "\\u001b[2J"), "'name' is not"},
           {with("\"RG0.0 F0.0 SA0.0 B0.0\"", "7"), "rank 0: not a text"},
           {with("B1.0", "X1.0"), "rank 1, action 2: 'X1.0' is none"},
           {with("B1.0", "\\u001b[2J"), "rank 1, action 2: '?[2J' is none"},
           {with("B1.0 ", ""), "rank 1 has no B1.0"},
           {with("RA1.0 F1.0", "RA1.0 RA1.0 F1.0"), "rank 1, action 1 (RA1.0): it stands there a"},
           {with("SG1.0", "SG1.0 F1.1"), "rank 1, action 4 (F1.1): there is no micro-batch 1"},
           {with("F1.0 B1.0", "B1.0 F1.0"), "rank 1, action 1 (B1.0): it stands before F1.0"}}) {
    const std::string told = usage_error([&text = text] { parse_schedule(text, "plan.json"); });
    EXPECT_THAT(told, StartsWith("plan.json"));
    EXPECT_THAT(told, HasSubstr(part));
  }
}

TEST(ScheduleFile, AFileThatIsNotThere) {
  EXPECT_THAT(usage_error([] { read_schedule("/nowhere/schedule.json"); }),
              HasSubstr("/nowhere/schedule.json"));
}

}  // namespace
}  // namespace lockstep::pipeline
