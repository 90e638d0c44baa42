// `lockstep plan memory`, as users start it.
#include <sys/resource.h>

#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <lockstep/models/spec/config.h>

#include "tests/launch/launched.h"

namespace lockstep::plan {
namespace {

using launch::testing::Folder;
using launch::testing::Launched;
using ::testing::AllOf;
using ::testing::HasSubstr;

struct Answer {
  int code;
  std::string output;
  std::string error;
};

Answer ask(std::vector<std::string> words) {
  words.insert(words.begin(), {LOCKSTEP_PROGRAM, "plan"});
  Launched run(std::move(words));
  const int code = run.wait();
  return {code, run.output(), run.error()};
}

nlohmann::json huge() {
  return {{"model",
           {{"family", "llama"},
            {"vocab_size", 128'256},
            {"hidden_size", 16'384},
            {"num_layers", 126},
            {"num_heads", 128},
            {"num_kv_heads", 8},
            {"intermediate_size", 53'248},
            {"tie_embeddings", false}}},
          {"data", {{"train", "not here.bin"}, {"sequence_length", 4096}}},
          {"output", "runs/huge"},
          {"train_micro_batch_size_per_gpu", 1},
          {"max_steps", 10},
          {"sharding_strategy", "FULL_SHARD"},
          {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 1e-4}}}}}};
}

class PlanCommand : public ::testing::Test {
 protected:
  std::string config(const nlohmann::json& content) {
    return folder_.write("config.json", content.dump(2));
  }

 private:
  Folder folder_;
};

// A model of 405 billion parameters, whose data is on another machine.
TEST_F(PlanCommand, TellsOfAHugeModelInATable) {
  const Answer answer = ask({"memory", config(huge()), "--ranks", "64,1024", "--device-memory",
                             "640GiB", "--device", "gpu", "--precision", "bf16"});
  EXPECT_EQ(answer.code, 0) << answer.error;
  EXPECT_THAT(
      answer.output,
      AllOf(HasSubstr("405.85 B parameters"), HasSubstr("SHARD_OPTIMIZER"),
            HasSubstr("* FULL_SHARD"), HasSubstr("activations"), HasSubstr("peak"),
            HasSubstr("Into 640.0 GiB a rank fit, on so many ranks: FULL_SHARD on 64, 1024.")));
  std::istringstream lines(answer.output.substr(0, answer.output.find("\n\n*")));
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 105u) << line;
}

TEST_F(PlanCommand, TakesNoMemoryOfItsOwn) {
#ifdef LOCKSTEP_SANITIZED
  GTEST_SKIP() << "sanitizers take memory of their own";
#endif
  // This is less than a thousandth of a layer of this model.
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_DATA, &before), 0);
  rlimit small = before;
  small.rlim_cur = 64 << 20;
  ASSERT_EQ(::setrlimit(RLIMIT_DATA, &small), 0);
  const Answer answer = ask({"memory", config(huge()), "--ranks", "1,1024"});
  ASSERT_EQ(::setrlimit(RLIMIT_DATA, &before), 0);
  EXPECT_EQ(answer.code, 0) << answer.error;
}

TEST_F(PlanCommand, TellsProgramsTheBytes) {
  const Answer answer =
      ask({"memory", config(huge()), "--ranks", "1,8", "--json", "--device-memory", "1TiB"});
  ASSERT_EQ(answer.code, 0) << answer.error;
  const auto told = nlohmann::json::parse(answer.output);
  EXPECT_EQ(told["device_memory"], std::int64_t{1} << 40);
  ASSERT_EQ(told["estimates"].size(), 10u);
  const auto& first = told["estimates"][0];
  EXPECT_EQ(first["ranks"], 1);
  EXPECT_EQ(first["strategy"], "NO_SHARD");
  EXPECT_EQ(first["weights"], 4 * models::num_parameters({.family = "llama",
                                                          .vocab_size = 128'256,
                                                          .hidden_size = 16'384,
                                                          .num_layers = 126,
                                                          .num_heads = 128,
                                                          .num_kv_heads = 8,
                                                          .intermediate_size = 53'248,
                                                          .tie_embeddings = false}));
  EXPECT_EQ(first["fits"], "no");
  for (const auto& row : told["estimates"])
    for (const char* key :
         {"gradients", "optimizer", "gathered", "gradients_on_their_way", "activations", "step",
          "buffers", "copies", "peak", "host_weights", "host_optimizer", "host_copies"})
      EXPECT_GE(row[key].get<std::int64_t>(), 0);
}

TEST_F(PlanCommand, TakesANumberOfParameters) {
  const Answer answer = ask({"memory", "--params", "7e9", "--precision", "bf16", "--json",
                             "--ranks", "8", "--offload", "optimizer"});
  ASSERT_EQ(answer.code, 0) << answer.error;
  const auto rows = nlohmann::json::parse(answer.output)["estimates"];
  // A strategy that does not cut gradients has nothing to offload.
  EXPECT_EQ(rows[0]["strategy"], "SHARD_GRAD_OP");
  EXPECT_EQ(rows[1]["strategy"], "FULL_SHARD");
  EXPECT_EQ(rows[1]["weights"], 1'750'000'000);
  EXPECT_EQ(rows[1]["host_optimizer"], 10'500'000'000);
  EXPECT_THAT(ask({"memory", "--params", "7B"}).output, HasSubstr("Activations"));
}

TEST_F(PlanCommand, PlansTheExample) {
  const Answer answer = ask({"memory", std::string(LOCKSTEP_EXAMPLES) + "/quickstart.json", "--set",
                             "model.vocab_size=256", "--ranks", "1,2,3"});
  EXPECT_EQ(answer.code, 0) << answer.error;
  EXPECT_THAT(answer.output, AllOf(HasSubstr("1.0 M parameters"),
                                   HasSubstr("of 32, 16, 11 sequences (on 1, 2, 3 ranks)")));
}

TEST_F(PlanCommand, RefusesWhatANumberOfParametersHasNoUseFor) {
  for (const std::vector<std::string>& words :
       {std::vector<std::string>{"--set", "max_steps=1"}, {"--device", "cuda"}}) {
    const Answer answer = ask({"memory", "--params", "7B", words[0], words[1]});
    EXPECT_EQ(answer.code, 2);
    EXPECT_THAT(answer.error, HasSubstr(words[0] + " is for a config"));
  }
}

TEST_F(PlanCommand, NamesMistakes) {
  const std::string good = config(huge());
  struct Case {
    std::vector<std::string> words;
    std::string part;
  };
  for (const auto& [words, part] : std::vector<Case>{
           {{}, "lockstep plan memory CONFIG.json"},
           {{"memroy", good}, "did you mean 'memory'"},
           {{"memory"}, "no config file was given"},
           {{"memory", "/nowhere/config.json"}, "/nowhere/config.json"},
           {{"memory", good, "--params", "7B"}, "one is enough"},
           {{"memory", "--params", "many"}, "--params is 'many'"},
           {{"memory", "--params", "-7e9"}, "--params is '-7e9'"},
           {{"memory", good, "--ranks", "0"}, "--ranks is '0'"},
           {{"memory", good, "--ranks", "1,,2"}, "--ranks is ''"},
           {{"memory", good, "--device-memory", "lots"}, "--device-memory is 'lots'"},
           {{"memory", good, "--precision", "fp8"}, "fp32, bf16 or fp16"},
           {{"memory", good, "--device", "tpu"}, "cpu or gpu"},
           {{"memory", good, "--offload", "disk"}, "--offload is 'disk'"},
           {{"memory", good, "--rank", "2"}, "did you mean '--ranks'"},
           {{"memory", good, "--set", "model.hiden_size=3"}, "did you mean 'hidden_size'"},
           {{"memory", good, "--set", "model.vocab_size=null"}, "model.vocab_size is not set"},
           {{"memory", good, "--set", "model.num_heads=127"}, "127"}}) {
    const Answer answer = ask(words);
    EXPECT_EQ(answer.code, 2) << part;
    EXPECT_THAT(answer.error, HasSubstr(part));
    EXPECT_EQ(answer.output, "");
  }
}

}  // namespace
}  // namespace lockstep::plan
