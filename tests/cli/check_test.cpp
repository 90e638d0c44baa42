// `lockstep check`, as a user runs it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <glob.h>

#include <fstream>

#include <nlohmann/json.hpp>

#include <lockstep/launch/processes/rank_setup.h>

#include "launched.h"
#include "network.h"

namespace lockstep::cli {
namespace {

using launch::testing::Folder;
using launch::testing::Launched;
using launch::testing::lines_of;
using launch::testing::Network;
using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;

// Hides the GPUs: the expected text must not depend on whether ranks would share one.
Launched check(std::vector<std::string> arguments, std::vector<std::string> variables = {}) {
  arguments.insert(arguments.begin(), {LOCKSTEP_PROGRAM, "check"});
  variables.push_back("CUDA_VISIBLE_DEVICES=");
  return Launched(std::move(arguments), std::move(variables));
}

std::size_t columns(const std::string& line) {
  return static_cast<std::size_t>(
      std::count_if(line.begin(), line.end(), [](char byte) { return (byte & 0xC0) != 0x80; }));
}

void expect_narrow(const std::string& text) {
  for (const std::string& line : lines_of(text)) EXPECT_LE(columns(line), 80u) << line;
}

std::string problems_of(const json& report) {
  std::string text;
  for (const json& problem : report.at("problems"))
    text += problem.at("what").get<std::string>() + "\n";
  return text;
}

TEST(Check, TellsOfTheMachine) {
  Launched alone = check({});
  EXPECT_EQ(alone.wait(), 0) << alone.error();
  const std::string text = alone.output();
  for (const char* word : {"Machine", "CPU", "memory", "LibTorch", "bf16", "fp8", "Problems"})
    EXPECT_THAT(text, HasSubstr(word));
  EXPECT_THAT(text, HasSubstr("shm       works"));
  EXPECT_THAT(text, HasSubstr("tcp       works"));
  EXPECT_THAT(text, Not(HasSubstr("Between ranks")));
  EXPECT_THAT(text, Not(HasSubstr("\x1b")));  // no colours without a terminal
  expect_narrow(text);
}

TEST(Check, JsonOfOneRank) {
  Launched alone = check({"--json"});
  EXPECT_EQ(alone.wait(), 0) << alone.error();
  const json report = json::parse(alone.output());
  EXPECT_TRUE(report.at("can_train"));
  ASSERT_EQ(report.at("hosts").size(), 1u);
  const json& host = report.at("hosts")[0];
  EXPECT_GT(host.at("num_cores"), 0);
  EXPECT_GT(host.at("total_bytes"), host.at("free_bytes"));
  EXPECT_FALSE(host.at("bf16").at("reason").get<std::string>().empty());
  EXPECT_EQ(report.at("backends").size(), 5u);
  EXPECT_TRUE(report.at("pairs").empty());
}

class CheckWithRanks : public ::testing::TestWithParam<int> {};

TEST_P(CheckWithRanks, MeasuresEveryPair) {
  const int num_ranks = GetParam();
  Launched ranks = check({"--nproc-per-node", std::to_string(num_ranks), "--json"});
  EXPECT_EQ(ranks.wait(milliseconds(60'000)), 0) << ranks.error();
  const json report = json::parse(ranks.output());
  EXPECT_EQ(report.at("launcher"), "lockstep run");
  EXPECT_EQ(report.at("ranks").size(), static_cast<std::size_t>(num_ranks));
  std::set<std::pair<int, int>> pairs;
  for (const json& pair : report.at("pairs")) {
    pairs.emplace(pair.at("a"), pair.at("b"));
    EXPECT_EQ(pair.at("transport"), "shm");
    EXPECT_GT(pair.at("latency_us"), 0.0);
    EXPECT_LT(pair.at("latency_us"), 1e6);
    EXPECT_GT(pair.at("bandwidth_gbps"), 0.0);
    EXPECT_LT(pair.at("bandwidth_gbps"), 1e4);
  }
  std::set<std::pair<int, int>> expected;
  for (int a = 0; a < num_ranks; ++a)
    for (int b = a + 1; b < num_ranks; ++b) expected.emplace(a, b);
  EXPECT_EQ(pairs, expected);
  EXPECT_TRUE(ranks.all_gone(milliseconds(60'000)));
}

INSTANTIATE_TEST_SUITE_P(Sizes, CheckWithRanks, ::testing::Values(1, 2, 3));

TEST(Check, PrintsRanksWithoutPrefixes) {
  Launched ranks = check({"--nproc-per-node", "3", "--backend", "tcp"});
  EXPECT_EQ(ranks.wait(milliseconds(60'000)), 0) << ranks.error();
  const std::string text = ranks.output();
  EXPECT_TRUE(text.starts_with("lockstep check")) << text;
  EXPECT_THAT(text, HasSubstr("Between ranks (backend tcp: tcp)"));
  expect_narrow(text);
}

TEST(Check, InsideLockstepRun) {
  Launched ranks({LOCKSTEP_PROGRAM, "run", "--nproc-per-node", "2", LOCKSTEP_PROGRAM, "check"},
                 {"CUDA_VISIBLE_DEVICES="});
  EXPECT_EQ(ranks.wait(milliseconds(60'000)), 0) << ranks.error();
  const std::string text = ranks.output();
  EXPECT_THAT(text, HasSubstr("Between ranks (backend auto: shm)"));
  EXPECT_EQ(text.find("Problems"), text.rfind("Problems")) << "only rank 0 speaks\n" << text;
}

TEST(Check, TellsHostsApart) {
  const Network network(2);
  if (!network.works()) GTEST_SKIP() << "no network namespaces here";
  const Folder folder;
  const std::string secret = folder.write("secret", std::string(32, 's'), 0600);
  const std::string file = (folder.path() / "report.json").string();
  const auto start = [&](int host) {
    return network.run(
        host, {"--nnodes", "2", "--node-rank", std::to_string(host), "--nproc-per-node", "2",
               "--rdzv-endpoint", Network::address(0) + ":29400", "--secret-file", secret,
               LOCKSTEP_PROGRAM, "check", "--report", file});
  };
  Launched first = start(0);
  Launched second = start(1);
  ASSERT_EQ(first.wait(milliseconds(60'000)), 0) << first.error();
  ASSERT_EQ(second.wait(milliseconds(60'000)), 0) << second.error();
  const json report = json::parse(std::ifstream(file));
  ASSERT_EQ(report.at("hosts").size(), 2u);
  EXPECT_EQ(report.at("hosts")[1].at("ranks"), json({2, 3}));
  EXPECT_EQ(report.at("backend"), "shm+tcp");
  for (const json& pair : report.at("pairs")) {
    const bool near = pair.at("a").get<int>() / 2 == pair.at("b").get<int>() / 2;
    EXPECT_EQ(pair.at("transport"), near ? "shm" : "tcp") << pair;
  }
}

TEST(Check, BadCommands) {
  struct Case {
    std::vector<std::string> arguments;
    const char* message;
  };
  for (const Case& one :
       {Case{{"--backend", "carrier-pigeon"}, "choose one of auto, shm+tcp, shm, tcp"},
        Case{{"--nproc-per-node", "2", "--backend", "pigeon"}, "choose one of"},
        Case{{"--nproc-per-node", "0"}, "from 1 to"},
        Case{{"--nproc-per-node", "two"}, "whole number"},
        Case{{"--jsno"}, "did you mean '--json'"}, Case{{"now"}, "takes no argument 'now'"}}) {
    Launched bad = check(one.arguments);
    EXPECT_EQ(bad.wait(), 2) << one.message;
    EXPECT_THAT(bad.error(), HasSubstr(one.message));
    EXPECT_EQ(lines_of(bad.error()).size(), 1u) << bad.error();
    EXPECT_EQ(bad.output(), "");
  }
}

TEST(Check, RanksCannotBeStartedTwice) {
  Launched twice({LOCKSTEP_PROGRAM, "run", "--nproc-per-node", "1", LOCKSTEP_PROGRAM, "check",
                  "--nproc-per-node", "2"});
  EXPECT_EQ(twice.wait(), 2);
  EXPECT_THAT(twice.error(), HasSubstr("these ranks have been started already (by lockstep run)"));
}

TEST(Check, SeesMoreRanksThanCores) {
  const std::string core = std::to_string(launch::allowed_cpus().front());
  Launched crowded(
      {"taskset", "-c", core, LOCKSTEP_PROGRAM, "check", "--nproc-per-node", "2", "--json"},
      {"CUDA_VISIBLE_DEVICES="});
  EXPECT_EQ(crowded.wait(milliseconds(60'000)), 0) << crowded.error();
  EXPECT_THAT(problems_of(json::parse(crowded.output())),
              HasSubstr("2 ranks take turns on 1 core"));
}

TEST(Check, SeesALimitOnOpenFiles) {
  Launched limited({"sh", "-c", "ulimit -n 200; exec \"$0\" check --json", LOCKSTEP_PROGRAM},
                   {"CUDA_VISIBLE_DEVICES="});
  EXPECT_EQ(limited.wait(), 1) << limited.error();
  const json report = json::parse(limited.output());
  EXPECT_FALSE(report.at("can_train"));
  EXPECT_THAT(problems_of(report), HasSubstr("may open only 200 files"));
}

TEST(Check, SeesTheReferenceBlas) {
  glob_t found{};
  const int failed = ::glob("/usr/lib/*-linux-gnu/blas/libblas.so.3", 0, nullptr, &found);
  const std::string file = failed == 0 ? found.gl_pathv[0] : "";
  ::globfree(&found);
  if (file.empty()) GTEST_SKIP() << "the reference BLAS is not installed";
  Launched usual = check({"--json"});
  ASSERT_EQ(usual.wait(), 0);
  if (json::parse(usual.output()).at("hosts")[0].at("blas").get<std::string>().empty())
    GTEST_SKIP() << "this LibTorch has its BLAS inside";
  Launched slow =
      check({"--json"}, {"LD_LIBRARY_PATH=" + std::filesystem::path(file).parent_path().string()});
  EXPECT_EQ(slow.wait(milliseconds(60'000)), 0) << slow.error();
  EXPECT_THAT(problems_of(json::parse(slow.output())), HasSubstr("reference BLAS"));
}

}  // namespace
}  // namespace lockstep::cli
