// `lockstep sample`, as a user runs it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <tuple>

#include "tests/base/files.h"
#include "training.h"

namespace lockstep::train::testing {
namespace {

namespace fs = std::filesystem;
using lockstep::testing::read_file;
using lockstep::testing::write_file;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

std::string text_of(std::vector<std::string> arguments) {
  Launched run = sample(std::move(arguments));
  EXPECT_EQ(run.wait(), 0) << run.error();
  return run.output();
}

void expect_refused(std::vector<std::string> arguments, const std::vector<std::string>& parts) {
  Launched run = sample(std::move(arguments));
  EXPECT_EQ(run.wait(), 2);
  for (const std::string& part : parts) EXPECT_THAT(run.error(), HasSubstr(part));
  EXPECT_EQ(launch::testing::lines_of(run.error()).size(), 1u) << run.error();
  EXPECT_EQ(run.output(), "") << "no text before the mistake";
}

// Whether a text is UTF-8 by the standard, as an independent reader sees it.
bool is_utf8(const std::string& text) {
  try {
    [[maybe_unused]] const std::string dumped = nlohmann::json(text).dump();
    return true;
  } catch (const nlohmann::json::type_error&) {
    return false;
  }
}

class Sample : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    training_ = std::make_unique<Training>(200, Training::Text::repeated);
    training_->set("/max_steps", 150).set("/optimizer/params/lr", 2e-2);
    training_->train(1);
  }
  static void TearDownTestSuite() { training_.reset(); }

  static std::string run_folder() { return training_->output().string(); }
  static inline std::unique_ptr<Training> training_;
};

TEST_F(Sample, WritesWhatWasLearnt) {
  const std::string text =
      text_of({run_folder(), "--prompt", "the quick", "--max-tokens", "60", "--temperature", "0"});
  EXPECT_THAT(text, StartsWith("the quick brown fo"));
  EXPECT_EQ(text.size(), 9u + 60 + 1);
  EXPECT_EQ(text_of({training_->checkpoint().string(), "--prompt", "the quick", "--max-tokens",
                     "60", "--temperature", "0"}),
            text);
}

TEST_F(Sample, TheSeedDecides) {
  const auto with_seed = [&](const char* seed) {
    return text_of({run_folder(), "--max-tokens", "80", "--temperature", "2", "--seed", seed});
  };
  const std::string text = with_seed("1");
  EXPECT_EQ(with_seed("1"), text);
  EXPECT_NE(with_seed("2"), text);
}

TEST_F(Sample, PromptsLongerThanTheContext) {
  const std::string prompt(100, 'a');  // the model has 16 positions
  const std::string text = text_of({run_folder(), "--prompt", prompt, "--max-tokens", "30"});
  EXPECT_THAT(text, StartsWith(prompt));
  EXPECT_GE(text.size(), 131u);
}

TEST_F(Sample, IsTextWhateverTheModelSays) {
  const std::string wild = text_of({run_folder(), "--prompt", "h\xC3\xA9 \xE2\x82\xAC",
                                    "--max-tokens", "300", "--temperature", "1000"});
  EXPECT_TRUE(is_utf8(wild)) << wild;
  EXPECT_THAT(wild, StartsWith("h\xC3\xA9 \xE2\x82\xAC"));
  // A byte that is not UTF-8, an overlong form, a surrogate, a number beyond the last character,
  // and a character cut short.
  const std::string bad =
      text_of({run_folder(), "--prompt", "\xFF\xC0\x80|\xED\xA0\x80|\xF4\x90|\xE2\x82",
               "--max-tokens", "1", "--temperature", "0"});
  EXPECT_TRUE(is_utf8(bad)) << bad;
  EXPECT_EQ(count(bad, "\xEF\xBF\xBD"), 1 + 2 + 3 + 2 + 1) << bad;
  EXPECT_EQ(count(bad, "|"), 3);
}

TEST_F(Sample, SaysWhichCheckpointItTakesInPlaceOfADamagedOne) {
  const fs::path run = training_->output().parent_path() / "damaged";
  const fs::path whole = run / "checkpoints/step-00000150";
  const fs::path damaged = run / "checkpoints/step-00000151";
  fs::create_directories(run / "checkpoints");
  for (const fs::path& folder : {whole, damaged}) fs::copy(training_->checkpoint(), folder);
  fs::remove(damaged / "manifest.json");
  Launched text = sample({run.string(), "--max-tokens", "1"});
  EXPECT_EQ(text.wait(), 0);
  EXPECT_THAT(text.error(), HasSubstr("step-00000151' has lost its manifest.json"));
  EXPECT_THAT(text.error(), HasSubstr("from the checkpoint before, '" + whole.string() + "'"));
}

TEST_F(Sample, NoticesThatTheTextIsNotWritten) {
  const auto shell = [&](const std::string& command) {
    return Launched({"sh", "-c", command, "sh", LOCKSTEP_PROGRAM, "sample", run_folder()},
                    {"OMP_NUM_THREADS=1"});
  };
  Launched full = shell("\"$@\" > /dev/full");
  EXPECT_EQ(full.wait(), 1);
  EXPECT_THAT(full.error(), HasSubstr("cannot be written: No space left"));
  for (const char* before : {"", "trap '' PIPE; "}) {
    Launched head = shell(before + std::string("\"$@\" --max-tokens 2000 | head -c 5"));
    EXPECT_EQ(head.wait(), 0);
    EXPECT_EQ(head.error(), "");
  }
}

TEST_F(Sample, HelpHasNoStrayBracket) {
  for (const char* verb : {"sample", "train"}) {
    Launched help({LOCKSTEP_PROGRAM, verb, "--help"});
    EXPECT_EQ(help.wait(), 0);
    EXPECT_EQ(count(help.output(), "["), count(help.output(), "]")) << help.output();
    EXPECT_THAT(help.output(), HasSubstr(std::string("Usage: lockstep ") + verb + " [FLAGS] "));
  }
}

TEST_F(Sample, Mistakes) {
  expect_refused({}, {"no model was given"});
  expect_refused({"/nowhere"}, {"'/nowhere' does not exist"});
  expect_refused({training_->folder().string()},
                 {"holds no model", "manifest.json", "model.safetensors"});
  expect_refused({run_folder(), "--max-tokens", "0"}, {"--max-tokens is '0'"});
  expect_refused({run_folder(), "--prompt", ""}, {"--prompt is empty"});
  expect_refused({run_folder(), "--max-tokens", "99999999999999999999"},
                 {"--max-tokens", "from 1"});
  expect_refused({run_folder(), "--seed", "-1"}, {"--seed is '-1'", "from 0"});
  expect_refused({run_folder(), "--top-k", "-1"}, {"--top-k is '-1'"});
  expect_refused({run_folder(), "--prompt", "a", "--tokens", "5"}, {"--prompt", "--tokens"});
  expect_refused({run_folder(), "--temperature", "-1"}, {"--temperature is -1"});
  expect_refused({run_folder(), "--tokens", "5,256"}, {"256", "0 to 255"});
  expect_refused({run_folder(), "--promt", "x"}, {"did you mean '--prompt'"});
}

TEST(SampleOfTokens, NeedsNumbers) {
  Training training;
  training.set("/model/vocab_size", 300);
  training.train(1);
  const std::string folder = training.output().string();
  expect_refused({folder}, {"300 tokens", "--tokens"});
  const std::string text = text_of({folder, "--tokens", "5,299", "--max-tokens", "3"});
  EXPECT_THAT(text, StartsWith("5 299 "));
  EXPECT_EQ(count(text, " "), 5) << text;
}

// The model is exported to Hugging Face's form and imported again: it stays the same.
TEST(SampleOfExport, WritesTheSameText) {
  for (const char* family : {"gpt2", "llama", "qwen2"}) {
    Training training;
    training.set("/model/family", family);
    training.train(2);
    const auto ckpt = [&](std::vector<std::string> words) {
      words.insert(words.begin(), {LOCKSTEP_PROGRAM, "ckpt"});
      Launched run(std::move(words));
      EXPECT_EQ(run.wait(), 0) << run.error();
      return run.output();
    };
    const std::string run = training.output().string();
    const std::string model = (training.folder() / "model").string();
    EXPECT_THAT(ckpt({"export", run, model, "--max-file-size", "20000"}),
                AllOf(HasSubstr("model-00001-of-"), HasSubstr("model.safetensors.index.json")));
    const std::string text = text_of({run, "--max-tokens", "30"});
    EXPECT_EQ(text_of({model, "--max-tokens", "30"}), text);
    const std::string imported = (training.folder() / "imported").string();
    ckpt({"import", model, imported});
    EXPECT_EQ(text_of({imported, "--max-tokens", "30"}), text);
    // All of the model's tensors are the same; only one has an optimizer's.
    Launched diff({LOCKSTEP_PROGRAM, "ckpt", "diff", run, imported});
    EXPECT_EQ(diff.wait(), 1);
    EXPECT_EQ(launch::testing::lines_of(diff.output()).size(), 3u) << diff.output();
    EXPECT_THAT(diff.output(), AllOf(HasSubstr("\nmodel: the same "), HasSubstr(", to the bit\n"),
                                     HasSubstr("\noptimizer: "), HasSubstr(" only in the first"),
                                     Not(HasSubstr("config.json"))));
    // Neither replaces an existing folder.
    for (const auto& [action, from, to] :
         {std::tuple("export", run, model), std::tuple("import", model, imported),
          std::tuple("import", model, run)}) {
      Launched again({LOCKSTEP_PROGRAM, "ckpt", action, from, to});
      EXPECT_EQ(again.wait(), 2) << action << ' ' << to;
      EXPECT_THAT(again.error(), AllOf(HasSubstr("already"), HasSubstr("name a new folder")));
    }
  }
}

// The listings of a run's checkpoints, for programs and for people.
TEST(Ckpt, TellsWhatIsThere) {
  Training training;
  training.set("/checkpoint/interval", 5);
  training.train(2);
  const auto ckpt = [&](std::vector<std::string> words, int exit_code) {
    words.insert(words.begin(), {LOCKSTEP_PROGRAM, "ckpt"});
    Launched run(std::move(words));
    EXPECT_EQ(run.wait(), exit_code) << run.error();
    return run.output() + run.error();
  };
  const std::string run = training.output().string();
  const fs::path newest = training.checkpoint();
  EXPECT_THAT(ckpt({"ls", run}, 0), AllOf(HasSubstr("step-00000010"), HasSubstr("step-00000012")));
  EXPECT_THAT(ckpt({"show", run}, 0), AllOf(HasSubstr("step 12"), HasSubstr("optimizer")));
  EXPECT_THAT(ckpt({"show", "--tensors", run}, 0), HasSubstr("model/transformer.wte.weight F32"));
  EXPECT_EQ(count(ckpt({"verify", run}, 0), "is whole"), 2);
  EXPECT_THAT(ckpt({"diff", run, newest.string()}, 0), HasSubstr("to the bit"));
  EXPECT_THAT(ckpt({"diff", run, (newest.parent_path() / "step-00000010").string()}, 1),
              HasSubstr("model/transformer.wte.weight:"));
  {
    Training other;
    other.set("/model/num_heads", 1);
    other.train(1);
    const std::string differences = ckpt({"diff", run, other.output().string()}, 1);
    EXPECT_THAT(differences, HasSubstr("config.json: n_head is 2 in the first, 1 in the second\n"));
    EXPECT_EQ(count(differences, "config.json: "), 1) << differences;
  }
  EXPECT_THAT(ckpt({"shw", run}, 2), HasSubstr("did you mean 'show'"));
  EXPECT_THAT(ckpt({"diff", run}, 2), HasSubstr("1 path was given"));
  EXPECT_THAT(ckpt({"show", training.folder().string()}, 2), HasSubstr("neither a checkpoint"));
  EXPECT_THAT(ckpt({"ls", newest.string()}, 2), HasSubstr("is a checkpoint itself"));
  EXPECT_THAT(ckpt({"ls", training.folder().string()}, 2), HasSubstr("not the folder of a run"));
  fs::create_directories(training.folder() / "begun/checkpoints");
  EXPECT_THAT(ckpt({"ls", training.output("begun").string()}, 0),
              HasSubstr("has no checkpoints yet"));
  fs::resize_file(newest / "shard-00001.safetensors", 3000);
  EXPECT_THAT(ckpt({"ls", run}, 0), AllOf(HasSubstr("DAMAGED"), HasSubstr("has 3000 bytes")));
  EXPECT_THAT(ckpt({"verify", run}, 1), HasSubstr("shard-00001.safetensors"));
  fs::remove(newest / "manifest.json");
  const auto lost = HasSubstr(newest.string() + "' has lost its manifest.json");
  EXPECT_THAT(ckpt({"ls", run}, 0), AllOf(HasSubstr("DAMAGED"), lost));
  EXPECT_THAT(ckpt({"verify", run}, 1), lost);
  EXPECT_THAT(ckpt({"verify", newest.string()}, 1), lost);
  EXPECT_THAT(ckpt({"show", run}, 2), lost);
}

TEST(SampleOfDamage, IsRefused) {
  Training training;
  training.train(1);
  // A config of another model with the same tensors.
  const fs::path config = training.checkpoint() / "config.json";
  const std::string before = read_file(config);
  std::string other = before;
  other.replace(other.find("\"n_head\": 2"), 11, "\"n_head\": 4");
  write_file(config, other);
  expect_refused({training.output().string()}, {"config.json", "is not what was written"});
  expect_refused({training.checkpoint().string()}, {"config.json", "is not what was written"});
  Launched further = training.start(
      1, "further", {"--set", "model={\"from\": \"" + training.checkpoint().string() + "\"}"});
  EXPECT_EQ(further.wait(), 2);
  EXPECT_THAT(further.error(), AllOf(HasSubstr("config.json"), HasSubstr("not what was written")));
  write_file(config, before);
  const fs::path weights = training.checkpoint() / "shard-00000.safetensors";
  fs::resize_file(weights, 1000);
  expect_refused({training.output().string()}, {"shard-00000.safetensors", "damaged"});
  fs::remove(training.checkpoint() / "config.json");
  expect_refused({training.output().string()}, {"config.json"});
}

}  // namespace
}  // namespace lockstep::train::testing
