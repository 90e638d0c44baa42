// `lockstep plan schedule`, as users start it.
#include <filesystem>
#include <fstream>
#include <iterator>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/launch/launched.h"

namespace lockstep::plan {
namespace {

using launch::testing::Folder;
using launch::testing::Launched;
using ::testing::AllOf;
using ::testing::HasSubstr;

struct Told {
  int code;
  std::string output;
  std::string error;
};

Told ask_schedule(std::vector<std::string> words) {
  words.insert(words.begin(), {LOCKSTEP_PROGRAM, "plan", "schedule"});
  Launched run(std::move(words), {"LC_ALL=C.UTF-8"});
  const int code = run.wait();
  return {code, run.output(), run.error()};
}

std::string text_of(const std::filesystem::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

TEST(ScheduleCommand, DrawsAScheduleAndTellsWhatItCosts) {
  const Told told = ask_schedule({"--kind", "1f1b", "--stages", "4", "--micro-batches", "8"});
  EXPECT_EQ(told.code, 0) << told.error;
  EXPECT_EQ(told.output,
            "1f1b: 4 ranks, 8 micro-batches\n"
            "\n"
            "rank 0  F0F1F2F3············B0──F4B1──F5B2──F6B3──F7B4──··B5──··B6──··B7──\n"
            "rank 1  ··F0F1F2········B0──F3B1──F4B2──F5B3──F6B4──F7B5──··B6──··B7──····\n"
            "rank 2  ····F0F1····B0──F2B1──F3B2──F4B3──F5B4──F6B5──F7B6──··B7──········\n"
            "rank 3  ······F0B0──F1B1──F2B2──F3B3──F4B4──F5B5──F6B6──F7B7──············\n"
            "        F forward, B backward, · idle\n"
            "\n"
            "bubble 27.3 % of a step that takes 33\n"
            "\n"
            "rank  stages    idle  micro-batches live at most\n"
            "   0  0       27.3 %  4\n"
            "   1  1       27.3 %  3\n"
            "   2  2       27.3 %  2\n"
            "   3  3       27.3 %  1\n");
}

TEST(ScheduleCommand, TellsOfChunksAndHalves) {
  const Told v = ask_schedule({"--kind", "zb-v", "--stages", "4", "--micro-batches", "16"});
  EXPECT_THAT(v.output, AllOf(HasSubstr("zb-v: 4 ranks with 2 stages each, 16 micro-batches"),
                              HasSubstr("bubble 3.0 % of a step that takes 49.5\n"),
                              HasSubstr("0.0 % where ranks start the next step without waiting"),
                              HasSubstr("   1  1, 6     3.0 %  4 (8 through one of 2 stages)\n")));
  const Told h1 = ask_schedule({"--kind", "zb-h1", "--stages", "4", "--micro-batches", "8"});
  EXPECT_THAT(h1.output,
              HasSubstr("   3  3       11.1 %  4, 1 of them before their input's backward\n"));
}

// Three chunks take 1/3 of the time each: (p - 1) (F + B + W) / v.
TEST(ScheduleCommand, TakesTimesAndChunks) {
  const Told told =
      ask_schedule({"--kind", "interleaved", "--chunks", "3", "--stages", "4", "--micro-batches",
                    "4", "--forward", "30", "--backward", "36", "--weight", "24"});
  EXPECT_THAT(told.output, AllOf(HasSubstr("with 3 stages each"), HasSubstr("takes 450\n")));
  EXPECT_THAT(ask_schedule({"--stages", "2", "--micro-batches", "1", "--transfer", "0.5"}).output,
              HasSubstr("takes 7\n"));
}

TEST(ScheduleCommand, WritesAndReadsFiles) {
  const Folder folder;
  const std::string file = folder.path() / "schedule.json";
  const std::string svg = folder.path() / "schedule.svg";
  const Told written = ask_schedule(
      {"--kind", "zb-v", "--stages", "2", "--micro-batches", "3", "--write", file, "--svg", svg});
  ASSERT_EQ(written.code, 0) << written.error;
  EXPECT_THAT(text_of(file), HasSubstr("\"rank_of_stage\": [0, 1, 1, 0]"));
  EXPECT_THAT(text_of(svg), AllOf(HasSubstr("<svg"), HasSubstr("zb-v · bubble 5.3 %"),
                                  HasSubstr("; 0.0 % between a rank's first action and its last")));
  const Told read = ask_schedule({"--read", file});
  EXPECT_EQ(read.code, 0) << read.error;
  EXPECT_EQ(read.output, written.output);

  std::string text = text_of(file);
  text.erase(text.find("W0.1"), 5);
  const std::string spoilt = folder.write("spoilt.json", text);
  const Told refused = ask_schedule({"--read", spoilt});
  EXPECT_EQ(refused.code, 2);
  EXPECT_THAT(refused.error, AllOf(HasSubstr(spoilt), HasSubstr("rank 0 has no W0.1")));
}

TEST(ScheduleCommand, NamesMistakes) {
  struct Case {
    std::vector<std::string> words;
    std::string part;
  };
  for (const auto& [words, part] : std::vector<Case>{
           {{}, "--stages is missing"},
           {{"--stages", "4"}, "--micro-batches is missing"},
           {{"--stages", "0", "--micro-batches", "8"}, "--stages is '0'"},
           {{"--stages", "4", "--micro-batches", "many"}, "--micro-batches is 'many'"},
           {{"--stages", "4", "--micro-batches", "8", "--kind", "1f2b"}, "did you mean '1f1b'"},
           {{"--stages", "4", "--micro-batches", "8", "--chunks", "2"}, "1f1b has 1 chunk a rank"},
           {{"--stages", "4", "--micro-batches", "8", "--chunks", "0"}, "--chunks is '0'"},
           {{"--stages", "4", "--micro-batches", "8", "--forward", "-1"}, "--forward is '-1'"},
           {{"--stages", "4", "--micro-batches", "8", "--transfer", "nan"}, "--transfer is 'nan'"},
           {{"--stages", "4", "--micro-batches", "8", "--forward", "0", "--backward", "0",
             "--weight", "0"},
            "nothing to draw"},
           {{"--stages", "60000", "--micro-batches", "1000"}, "choose fewer"},
           {{"--stage", "4"}, "did you mean '--stages'"},
           {{"--read", "/nowhere.json"}, "/nowhere.json"},
           {{"--read", "/nowhere.json", "--stages", "4"}, "--stages and --read"},
           {{"--stages", "4", "--micro-batches", "8", "more"}, "takes no argument 'more'"}}) {
    const Told told = ask_schedule(words);
    EXPECT_EQ(told.code, 2) << part;
    EXPECT_THAT(told.error, HasSubstr(part));
    EXPECT_EQ(told.output, "");
  }
  // A failure of the disk is not the user's mistake.
  EXPECT_EQ(ask_schedule({"--stages", "1", "--micro-batches", "1", "--svg", "/nowhere/a.svg"}).code,
            1);
}

TEST(ScheduleCommand, IsNamedBesideMemory) {
  Launched run({LOCKSTEP_PROGRAM, "plan", "shedule"});
  EXPECT_EQ(run.wait(), 2);
  EXPECT_THAT(run.error(), HasSubstr("did you mean 'schedule'"));
  Launched help({LOCKSTEP_PROGRAM, "plan", "schedule", "--help"});
  EXPECT_EQ(help.wait(), 0);
  EXPECT_THAT(help.output(), AllOf(HasSubstr("--micro-batches"), HasSubstr("zb-h1")));
}

}  // namespace
}  // namespace lockstep::plan
