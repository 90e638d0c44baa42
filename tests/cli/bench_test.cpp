// `lockstep bench`, as a user runs it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "launched.h"

namespace lockstep::cli {
namespace {

using launch::testing::Launched;
using launch::testing::lines_of;
using nlohmann::json;
using ::testing::HasSubstr;

Launched bench(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {LOCKSTEP_PROGRAM, "bench", "collectives"});
  return Launched(std::move(arguments), {"CUDA_VISIBLE_DEVICES="});
}

TEST(Bench, MeasuresWhatItIsTold) {
  Launched ranks = bench({"--op", "all_reduce,all-to-all", "--min", "1K", "--max", "2K", "--json",
                          "--iterations", "2", "--warmup", "0", "--nproc_per_node", "2"});
  ASSERT_EQ(ranks.wait(milliseconds(60'000)), 0) << ranks.error();
  const json report = json::parse(ranks.output());
  EXPECT_EQ(report.at("ranks"), 2);
  ASSERT_EQ(report.at("results").size(), 4u);
  for (const json& row : report.at("results")) EXPECT_EQ(row.at("wrong"), 0) << row;
}

TEST(Bench, AnAlgorithmMeasuresTheOperationsThatHaveIt) {
  Launched ranks = bench({"--algorithm", "halving_doubling", "--min", "1K", "--max", "1K", "--json",
                          "--iterations", "1", "--warmup", "0"});
  ASSERT_EQ(ranks.wait(milliseconds(60'000)), 0) << ranks.error();
  const json report = json::parse(ranks.output());
  EXPECT_FALSE(report.at("results").empty());
  for (const json& row : report.at("results")) EXPECT_NE(row.at("operation"), "all_to_all");
}

// The error is printed once, before any rank starts.
TEST(Bench, BadCommands) {
  struct Case {
    std::vector<std::string> arguments;
    const char* message;
  };
  for (const Case& one :
       {Case{{"--backend", "pigeon"}, "choose one of auto, shm+tcp, shm, tcp"},
        Case{{"--op", "all_reduce,all_redcue"}, "'all_redcue'"},
        Case{{"--algorithm", "spiral"}, "no algorithm 'spiral'"},
        Case{{"--op", "all_to_all", "--algorithm", "ring"}, "ring"},
        Case{{"--min", "4Q"}, "--min is '4Q'"}, Case{{"--max", "0"}, "--max is '0'"},
        Case{{"--min", "2M", "--max", "1M"}, "--min 2M is larger than --max 1M"},
        Case{{"--dtype", "int3"}, "--dtype is 'int3'"},
        Case{{"--report", "/tmp/x"}, "--report writes the JSON that --json asks for"},
        Case{{"--device", "gpu"}, "--device is 'gpu': choose cpu or cuda"},
        Case{{"--device", "cuda", "--allocated"}, "--allocated is memory of the host"},
        Case{{"--device", "cuda"}, "no device of kind 'cuda'"},
        Case{{"--iterations", "0"}, "--iterations 0"}, Case{{"--iterations", "many"}, "many"},
        Case{{"--nproc-per-node", "0"}, "--nproc-per-node 0"},
        Case{{"--mni", "1K"}, "'--mni': did you mean '--min'?"},
        Case{{"latency"}, "takes no argument 'latency'"}}) {
    Launched bad = bench(one.arguments);
    EXPECT_EQ(bad.wait(), 2) << one.message;
    EXPECT_THAT(bad.error(), HasSubstr(one.message));
    EXPECT_EQ(lines_of(bad.error()).size(), 1u) << bad.error();
    EXPECT_EQ(bad.output(), "");
  }
}

}  // namespace
}  // namespace lockstep::cli
