#include <lockstep/flight/dump.h>

#include <cstdlib>
#include <fstream>
#include <functional>

#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/error.h>
#include <lockstep/flight/report.h>

namespace lockstep::flight {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::HasSubstr;

class DumpTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "lockstep-flight-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
  }
  void TearDown() override { fs::remove_all(directory_); }

  std::string error_of(const fs::path& path) {
    try {
      read_dump(path);
    } catch (const UsageError& error) {
      return error.what();
    }
    return "";
  }

  // The error about a good dump with one change.
  std::string error_after(const std::function<void(json&)>& change) {
    Recorder recorder("world", 1, {0, 1}, nullptr);
    recorder.record({.sequence = 1, .operation = "barrier"});
    EXPECT_TRUE(write_dump(recorder, directory_, {.reason = "test"}));
    const fs::path path = list_dumps(directory_).at(0);
    json root = json::parse(std::ifstream(path));
    change(root);
    std::ofstream(path) << root;
    return error_of(path);
  }

  fs::path directory_;
};

TEST_F(DumpTest, ComesBackAsItWas) {
  Recorder recorder("tp[dp=1]", 1, {6, 7}, nullptr, 16, 3);
  const auto call =
      recorder.record({.sequence = 4, .operation = "all_gather", .file = "a/b.cpp", .line = 9});
  recorder.mark(call, State::started);
  Record exchange{.sequence = 0, .operation = "exchange"};
  add_peer(exchange, 0);
  recorder.record(exchange);
  ASSERT_TRUE(
      write_dump(recorder, directory_ / "made" / "here",
                 {.reason = "because \xff of \"it\"", .fault = "timeout", .at_fault = {6}}));
  const auto files = list_dumps(directory_ / "made" / "here");
  ASSERT_EQ(files.size(), 1u);
  EXPECT_THAT(files[0].filename().string(), HasSubstr("rank7.json"));
  const Dump dump = read_dump(files[0]);
  EXPECT_EQ(dump.group, "tp[dp=1]");
  EXPECT_EQ(dump.generation, 3u);
  EXPECT_EQ(dump.rank, 1);
  EXPECT_EQ(dump.global_rank(), 7);
  EXPECT_EQ(dump.members, (std::vector<int>{6, 7}));
  EXPECT_EQ(dump.pid, getpid());
  EXPECT_FALSE(dump.host.empty());
  EXPECT_THAT(dump.cause.reason, testing::StartsWith("because "));
  EXPECT_EQ(dump.cause.fault, "timeout");
  EXPECT_EQ(dump.cause.at_fault, std::vector<int>{6});
  EXPECT_FALSE(dump.progress);
  EXPECT_THAT(dump.wall_clock, testing::MatchesRegex("....-..-..T..:..:..\\....Z"));
  EXPECT_EQ(dump.last_sequence, 4u);
  const auto entries = recorder.entries();
  ASSERT_EQ(dump.entries.size(), entries.size());
  for (std::size_t i = 0; i < entries.size(); ++i) {
    EXPECT_EQ(dump.entries[i].number, entries[i].number);
    EXPECT_EQ(dump.entries[i].sequence, entries[i].sequence);
    EXPECT_EQ(dump.entries[i].summary, entries[i].summary);
    EXPECT_EQ(dump.entries[i].call_site, entries[i].call_site);
    EXPECT_EQ(dump.entries[i].peers, entries[i].peers);
    EXPECT_EQ(dump.entries[i].state, entries[i].state);
    EXPECT_EQ(dump.entries[i].queued_ns, entries[i].queued_ns);
    EXPECT_EQ(dump.entries[i].started_ns, entries[i].started_ns);
    EXPECT_EQ(dump.entries[i].finished_ns, entries[i].finished_ns);
    EXPECT_LE(dump.entries[i].queued_ns, dump.now_ns);
  }
}

TEST_F(DumpTest, OneFileForEachGroupAndRank) {
  const Recorder world("world", 0, {0, 1, 2, 3}, nullptr);
  const Recorder other_rank("world", 1, {0, 1, 2, 3}, nullptr);
  const Recorder same_name("world", 0, {0, 2}, nullptr);
  const Recorder odd_name("a/../b", 0, {0}, nullptr);
  for (const Recorder* recorder : {&world, &other_rank, &same_name, &odd_name, &world})
    EXPECT_TRUE(write_dump(*recorder, directory_, {.reason = "x"}));
  EXPECT_EQ(list_dumps(directory_).size(), 4u);
  // No temporary file is left, and no file was written outside of the directory.
  EXPECT_EQ(std::distance(fs::directory_iterator(directory_), fs::directory_iterator()), 4);
}

TEST_F(DumpTest, FailsWithoutThrowing) {
  const Recorder recorder("world", 0, {0}, nullptr);
  std::ofstream(directory_ / "file") << "x";
  EXPECT_FALSE(write_dump(recorder, directory_ / "file" / "below", {.reason = "x"}));
  EXPECT_FALSE(write_dump(recorder, "/proc/no/such", {.reason = "x"}));
}

TEST_F(DumpTest, MalformedNamesFileAndPlace) {
  const auto path = directory_ / "flight-x.json";
  EXPECT_THAT(error_of(path), HasSubstr("flight-x.json"));
  EXPECT_THAT(error_of(directory_), HasSubstr("no such file"));
  std::ofstream(path) << "{\"format\": \"lockstep-fl";
  EXPECT_THAT(error_of(path), testing::AllOf(HasSubstr("flight-x.json"), HasSubstr("byte 2")));
  std::ofstream(path) << "";
  EXPECT_THAT(error_of(path), HasSubstr("not valid JSON"));
  std::ofstream(path) << "[1]";
  EXPECT_THAT(error_of(path), HasSubstr("top level: not an object"));
}

TEST_F(DumpTest, WrongFieldsNameTheirPlace) {
  EXPECT_EQ(error_after([](json&) {}), "");
  EXPECT_THAT(error_after([](json& d) { d["format"] = "else"; }), HasSubstr("format: this is not"));
  EXPECT_THAT(error_after([](json& d) { d["version"] = 2; }), HasSubstr("version 2"));
  EXPECT_THAT(error_after([](json& d) { d.erase("host"); }), HasSubstr("'host' is missing"));
  EXPECT_THAT(error_after([](json& d) { d["rank"] = 2; }), HasSubstr("rank: 2 is not"));
  EXPECT_THAT(error_after([](json& d) { d["rank"] = -1; }), HasSubstr("rank: -1 is not"));
  EXPECT_THAT(error_after([](json& d) { d["members"] = json::array(); }), HasSubstr("members"));
  EXPECT_THAT(error_after([](json& d) { d["members"][1] = 1.5; }), HasSubstr("members[1]: 1.5"));
  EXPECT_THAT(error_after([](json& d) { d["generation"] = 1ull << 40; }), HasSubstr("generation"));
  EXPECT_THAT(error_after([](json& d) { d["reason"] = std::string(1 << 20, 'x'); }),
              HasSubstr("reason: 1048576 bytes"));
  EXPECT_THAT(error_after([](json& d) {
                d["progress"] = {{"step", 1}};
              }),
              HasSubstr("progress: 'phase' is missing"));
  EXPECT_THAT(error_after([](json& d) { d["at_fault"] = {-1}; }), HasSubstr("at_fault[0]: -1"));
  EXPECT_THAT(error_after([](json& d) {
                d["entries"][0]["peers"] = {1, 2, 3, 4, 5};
              }),
              HasSubstr("entries[0].peers: 5 elements"));
  EXPECT_THAT(error_after([](json& d) { d["as_of_ns"] = "now"; }), HasSubstr("as_of_ns: \"now\""));
  EXPECT_THAT(error_after([](json& d) { d["entries"] = 3; }), HasSubstr("entries: not a list"));
  EXPECT_THAT(error_after([](json& d) { d["entries"][0]["state"] = "odd"; }),
              HasSubstr("entries[0].state: 'odd'"));
  EXPECT_THAT(error_after([](json& d) { d["entries"][0]["queued_ns"] = -5; }),
              HasSubstr("entries[0].queued_ns: -5"));
  EXPECT_THAT(error_after([](json& d) { d["entries"].push_back(d["entries"][0]); }),
              HasSubstr("entries[1].number"));
}

TEST_F(DumpTest, ReportOfADirectory) {
  EXPECT_EQ(merged_report(directory_), "");
  EXPECT_EQ(merged_report(directory_ / "none"), "");
  Recorder recorder("world", 0, {0, 1}, nullptr);
  recorder.mark(recorder.record({.sequence = 1, .operation = "barrier"}), State::started);
  ASSERT_TRUE(write_dump(recorder, directory_, {.reason = "deadline"}));
  std::ofstream(directory_ / "flight-bad.json") << "no";
  const std::string report = merged_report(directory_);
  EXPECT_THAT(report, HasSubstr("rank 0 is in barrier #1, for "));
  EXPECT_THAT(report, HasSubstr("no word from rank 1"));
  EXPECT_THAT(report, HasSubstr("left out: flight dump"));
  EXPECT_THAT(report, HasSubstr("flight-bad.json"));
}

}  // namespace
}  // namespace lockstep::flight
