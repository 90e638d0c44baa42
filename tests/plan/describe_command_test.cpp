// `lockstep train --describe`, as users start it.
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/base/files.h"
#include "tests/launch/launched.h"

namespace lockstep::plan {
namespace {

using launch::testing::Folder;
using launch::testing::Launched;
using lockstep::testing::read_file;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// A GPT of four layers, four heads, and 32 sequences a step.
class DescribeCommand : public ::testing::Test {
 protected:
  DescribeCommand() {
    std::ofstream text(folder_.path() / "text.txt");
    for (int i = 0; i < 4000; ++i) text << "word ";
  }

  struct Told {
    int code;
    std::string output;
    std::string error;
  };

  Told ask(const std::vector<std::string>& settings, std::vector<std::string> flags,
           const std::string& locale = "C.UTF-8") {
    std::vector<std::string> words = {LOCKSTEP_PROGRAM, "train", "--describe",
                                      LOCKSTEP_EXAMPLES "/quickstart.json"};
    for (const std::string& setting :
         {"data.train=" + (folder_.path() / "text.txt").string(),
          "output=" + (folder_.path() / "run").string(), std::string("model.vocab_size=256")})
      words.insert(words.end(), {"--set", setting});
    for (const std::string& setting : settings) words.insert(words.end(), {"--set", setting});
    words.insert(words.end(), flags.begin(), flags.end());
    Launched run(words, {"LC_ALL=" + locale});
    const int code = run.wait();
    return {code, run.output(), run.error()};
  }

  Folder folder_;
};

TEST_F(DescribeCommand, ShowsWhoHoldsWhat) {
  const Told told = ask({"parallel.tensor=2", "parallel.pipeline=2", "sharding_strategy=FULL_SHARD",
                         "gradient_accumulation_steps=4"},
                        {"--nproc-per-node", "8"});
  EXPECT_EQ(told.code, 0) << told.error;
  EXPECT_EQ(
      told.output,
      "GPT, 1.0 M parameters, on 8 ranks: pp 2 × dp_shard 2 × tp 2\n"
      "\n"
      "dp_shard │ 0     │ 1\n"
      "tp       │ 0  1  │ 0  1\n"
      "─────────┼───────┼───────\n"
      "pp 0     │ 0  1  │ 2  3   embedding, layers 0–1\n"
      "pp 1     │ 4  5  │ 6  7   layers 2–3, head\n"
      "\n"
      "pp          2  stages: 2 of them by 1f1b, 4 micro-batches a step; with stages that take as "
      "long, ranks are idle for 20.0 % of it\n"
      "dp_shard    2  samples of their own; parameters, gradients and the optimizer's state in 2 "
      "parts\n"
      "tp          2  parts of each layer; a rank sends 4.5 MiB along it in a step\n"
      "\n"
      "Each batch of 8 sequences goes to 2 ranks or groups of ranks, 4 such batches a step.\n"
      "\n"
      "rank  pp  dp_shard  tp  layers                 heads  MLP      vocabulary  samples    shard "
      "  parameters\n"
      "0     0   0         0   embedding, layers 0–1  0–1    0–287    0–127       0, 2, … 6  0 of "
      "2  139.6 k\n"
      "1     0   0         1   embedding, layers 0–1  2–3    288–575  128–255     0, 2, … 6  0 of "
      "2  139.6 k\n"
      "2     0   1         0   embedding, layers 0–1  0–1    0–287    0–127       1, 3, … 7  1 of "
      "2  139.6 k\n"
      "3     0   1         1   embedding, layers 0–1  2–3    288–575  128–255     1, 3, … 7  1 of "
      "2  139.6 k\n"
      "4     1   0         0   layers 2–3, head       0–1    0–287    0–127       0, 2, … 6  0 of "
      "2  135.1 k\n"
      "5     1   0         1   layers 2–3, head       2–3    288–575  128–255     0, 2, … 6  0 of "
      "2  135.1 k\n"
      "6     1   1         0   layers 2–3, head       0–1    0–287    0–127       1, 3, … 7  1 of "
      "2  135.1 k\n"
      "7     1   1         1   layers 2–3, head       2–3    288–575  128–255     1, 3, … 7  1 of "
      "2  135.1 k\n");
}

TEST_F(DescribeCommand, ShowsTheBatchOnEachNumberOfHosts) {
  const Told told = ask({"parallel.tensor=2", "train_micro_batch_size_per_gpu=4"},
                        {"--nnodes", "2:5", "--nproc-per-node", "3"});
  EXPECT_EQ(told.code, 2) << "15 ranks are none of pairs";
  const Told pairs = ask({"parallel.tensor=2", "train_micro_batch_size_per_gpu=4"},
                         {"--nnodes", "1:4", "--nproc-per-node", "3"});
  EXPECT_EQ(pairs.code, 0) << pairs.error;
  EXPECT_THAT(pairs.output,
              HasSubstr("The run keeps its steps of 32 samples when hosts leave and come:\n"
                        "hosts  ranks  samples of a rank  passes  of at most\n"
                        "    1      3  cannot be: parallel has "));
  EXPECT_THAT(pairs.output, HasSubstr("    2      6           10 or 11       3           4\n"));
  EXPECT_THAT(pairs.output, HasSubstr("    4     12             5 or 6       2           3\n"));
  // If the config leaves the batch to the number of ranks, the largest number counts.
  EXPECT_THAT(ask({"train_batch_size=auto", "train_micro_batch_size_per_gpu=4"},
                  {"--nnodes", "1:2", "--nproc-per-node", "2"})
                  .output,
              HasSubstr("    1      2                  8       2           4\n"
                        "    2      4                  4       1           4\n"));
  EXPECT_THAT(ask({}, {"--nnodes", "3:2"}).error, HasSubstr("give --nnodes 2:3"));
  EXPECT_THAT(ask({}, {"--nnodes", "1:100"}).error, HasSubstr("up to 64 numbers of hosts"));
}

TEST_F(DescribeCommand, ShowsPositionsStagesAndSharedHeads) {
  EXPECT_THAT(
      ask({"parallel.context=2"}, {"--nproc-per-node", "4"}).output,
      AllOf(HasSubstr("dp_replicate 2 × cp 2"), HasSubstr("0–15, 48–63"), HasSubstr("16–47")));
  EXPECT_THAT(
      ask({"parallel.pipeline=2", "parallel.schedule=zb-v", "gradient_accumulation_steps=4"},
          {"--nproc-per-node", "2"})
          .output,
      AllOf(HasSubstr("pp 0  │ 0   embedding, layer 0, layer 3, head\n"),
            HasSubstr("pp 1  │ 1   layer 1, layer 2\n")));
  EXPECT_THAT(ask({"model.family=llama", "model.num_kv_heads=2", "parallel.tensor=4"},
                  {"--nproc-per-node", "4"})
                  .output,
              AllOf(HasSubstr("kv heads"), HasSubstr("  1      0         96–191"),
                    HasSubstr("  2      1         192–287")));
}

// With four stages, those in the middle have neither embedding nor head.
TEST_F(DescribeCommand, NamesRowsOfTheVocabularyWhereThereAreSome) {
  EXPECT_THAT(ask({"parallel.tensor=2", "parallel.pipeline=4", "gradient_accumulation_steps=4"},
                  {"--nproc-per-node", "8"})
                  .output,
              AllOf(HasSubstr("  0–287    0–127       "), HasSubstr("\n2     1   0   layer 1"),
                    HasSubstr("  0–287                ")));
}

// A CPU sends 32 bits in any case.
TEST_F(DescribeCommand, SaysWhatIsSentOnWhichDevice) {
  const auto sent = [&](std::vector<std::string> settings) {
    settings.insert(settings.end(), {"parallel.tensor=2", "gradient_accumulation_steps=4"});
    return ask(settings, {"--nproc-per-node", "2"}).output;
  };
  EXPECT_THAT(sent({"device=cpu"}), HasSubstr("a rank sends 18.0 MiB along it in a step\n"));
  EXPECT_THAT(sent({"device=cpu", "bf16.enabled=true"}),
              HasSubstr("a rank sends 18.0 MiB along it in a step\n"));
  EXPECT_THAT(sent({"bf16.enabled=true"}),
              HasSubstr("a rank sends 9.0 MiB along it in a step on a GPU, and twice as much on a "
                        "CPU, which computes in fp32\n"));
}

TEST_F(DescribeCommand, SaysWhenTheTensorAxisReachesOverHosts) {
  const std::vector<std::string> flags = {"--nproc-per-node", "2", "--nnodes", "2"};
  EXPECT_THAT(ask({"parallel.tensor=4"}, flags).output,
              AllOf(HasSubstr("on 4 ranks of 2 hosts"),
                    HasSubstr("reaches over hosts (ranks 0, 1 of host 0 with 2, 3 of host 1)"),
                    HasSubstr("With tensor 2 it stays inside")));
  EXPECT_THAT(ask({"parallel.tensor=2"}, flags).output, Not(HasSubstr("reaches over")));
  EXPECT_THAT(
      ask({"parallel.tensor=4", "train_batch_size=36"}, {"--nproc-per-node", "6", "--nnodes", "2"})
          .output,
      HasSubstr("With tensor 2 it stays inside"));
  EXPECT_THAT(
      ask({"parallel.tensor=2", "train_batch_size=36"}, {"--nproc-per-node", "3", "--nnodes", "2"})
          .output,
      HasSubstr("Give hosts a number of ranks that a tensor axis divides"));
}

TEST_F(DescribeCommand, BalancesStagesAsAsked) {
  const auto first_stage = [&](const std::string& setting) {
    const std::string output = ask({"parallel.pipeline=2", "gradient_accumulation_steps=2",
                                    "model.num_layers=8", "model.vocab_size=20000", setting},
                                   {"--nproc-per-node", "2"})
                                   .output;
    const std::size_t at = output.find("pp 0");
    return output.substr(at, output.find('\n', at) - at);
  };
  EXPECT_THAT(first_stage("parallel.balance=layers"), HasSubstr("layers 0–3"));
  // The head has 2.9 M weights and a layer 0.25 M, so the head shares its stage with one layer.
  EXPECT_THAT(first_stage("parallel.balance=compute"), HasSubstr("layers 0–6"));
  EXPECT_THAT(first_stage("parallel.balance=parameters"), HasSubstr("layers 0–3"));
  EXPECT_THAT(first_stage("parallel.stage_layers=[1,7]"), HasSubstr("layer 0"));
}

TEST_F(DescribeCommand, DrawsAPicture) {
  const auto file = folder_.path() / "layout.svg";
  const Told told = ask({"parallel.pipeline=2", "gradient_accumulation_steps=2"},
                        {"--nproc-per-node", "4", "--svg", file.string()});
  EXPECT_EQ(told.code, 0) << told.error;
  EXPECT_THAT(read_file(file), AllOf(HasSubstr("<svg"), HasSubstr("rank 3"),
                                     HasSubstr("layers 2–3, head"), HasSubstr("dp_replicate 1")));
}

TEST_F(DescribeCommand, ShowsWhatFitsOfManyRanks) {
  const Told told = ask({"train_batch_size=1024"}, {"--nproc-per-node", "512"});
  EXPECT_EQ(told.code, 0) << told.error;
  EXPECT_THAT(told.output, HasSubstr("…  embedding, layers 0–3, head\n"));
  EXPECT_THAT(told.output, HasSubstr("\n511   511           embedding"));
}

TEST_F(DescribeCommand, SpeaksAsciiWhereNothingElseIsShown) {
  const std::string output =
      ask({"parallel.tensor=2"}, {"--nproc-per-node", "4"}, /*locale=*/"C").output;
  EXPECT_THAT(output, HasSubstr("dp_replicate 2 x tp 2"));
  EXPECT_THAT(output, HasSubstr("embedding, layers 0-3, head"));
  for (const char byte : output) EXPECT_GE(byte, 0);
}

TEST_F(DescribeCommand, RefusesWhatTrainingWould) {
  const auto refusal = [&](const std::string& setting) {
    const Told told = ask({setting}, {"--nproc-per-node", "4"});
    EXPECT_EQ(told.code, 2) << setting;
    return told.error;
  };
  EXPECT_THAT(refusal("parallel.tensor=3"),
              AllOf(HasSubstr("4 heads cannot be shared by 3 ranks"), Not(HasSubstr("start"))));
  EXPECT_THAT(refusal("parallel.pipeline=3"),
              HasSubstr("start 3 or 6, or make it tensor 1 × pipeline 2 × context 1"));
}

// Values that are wrong by themselves, that do not fit other keys or the ranks, and mistakes in the
// files.
TEST_F(DescribeCommand, NamesAllMistakesInOneRound) {
  const std::string text = (folder_.path() / "text.txt").string();
  const std::string tokens = (folder_.path() / "tokens.bin").string();
  std::ofstream(tokens) << std::string(4000, 'x');
  const Told told = ask(
      {"seed=x", "data.validation=" + tokens, "data.validation_fraction=0", "model.vocab_size=50",
       "gradient_accumulation_steps=3", "train_micro_batch_size_per_gpu=2", "train_batch_size=30",
       "fsdp.ranks_per_copy=3", "sharding_strategy=HYBRID_SHARD", "steps_per_prin=2"},
      {"--nproc-per-node", "4"});
  EXPECT_EQ(told.code, 2);
  EXPECT_THAT(told.error, HasSubstr("quickstart.json has 6 mistakes:\n"));
  for (const std::string& part :
       {std::string("--set seed=x: seed is \"x\": it must be a whole number"),
        "'" + text + "' is read as text (8-bit tokens) and '" + tokens + "' as nanogpt (16-bit",
        std::string("model.vocab_size is 50: token 119 at position 0"),
        std::string("train_batch_size 30 is not train_micro_batch_size_per_gpu 2 × "
                    "gradient_accumulation_steps 3 × 4 ranks = 24"),
        std::string("fsdp.ranks_per_copy is 3, and 4 ranks do not divide"),
        std::string("steps_per_prin is no key of a config: did you mean 'steps_per_print'?")})
    EXPECT_THAT(told.error, HasSubstr(part));
  // Checks that depend on a mistyped key are not made.
  EXPECT_THAT(ask({"parallel.pipelin=2", "parallel.timeline_step=9999"}, {}).error,
              AllOf(HasSubstr("did you mean 'pipeline'?"), Not(HasSubstr("timeline_step is"))));
}

TEST_F(DescribeCommand, RefusesDataOfTwoFormats) {
  const std::string text = (folder_.path() / "text.txt").string();
  const std::string tokens = (folder_.path() / "tokens.bin").string();
  std::ofstream(tokens) << std::string(4000, 'x');
  for (const std::string& files :
       {"data.train=[\"" + text + "\", \"" + tokens + "\"]",
        "data.validation=[\"" + text + "\", \"" + tokens + "\"]", "data.validation=" + tokens}) {
    const Told told = ask({"data.validation_fraction=0", files}, {});
    EXPECT_EQ(told.code, 2) << files;
    EXPECT_THAT(told.error, HasSubstr("'" + text + "' is read as text (8-bit tokens) and '" +
                                      tokens + "' as nanogpt (16-bit tokens)"));
  }
  const Told told =
      ask({"data.train=[\"" + text + "\", \"" + tokens + "\"]", "data.format=text"}, {});
  EXPECT_EQ(told.code, 0) << told.error;
}

// For editors: `lockstep train --schema > lockstep.schema.json`.
TEST(TrainSchema, IsPrintedWithoutAConfig) {
  Launched command({LOCKSTEP_PROGRAM, "train", "--schema"});
  ASSERT_EQ(command.wait(), 0) << command.error();
  const auto schema = nlohmann::json::parse(command.output());
  EXPECT_TRUE(schema["properties"]["optimizer"]["properties"].contains("params"));
}

}  // namespace
}  // namespace lockstep::plan
