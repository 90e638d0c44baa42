// Mistakes that are found before a rank starts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include <lockstep/checkpoint/format/reader.h>
#include <lockstep/checkpoint/safetensors/folder.h>

#include "tests/base/files.h"
#include "tests/checkpoint/tiny_disk.h"
#include "training.h"

namespace lockstep::train::testing {
namespace {

namespace fs = std::filesystem;
using lockstep::testing::read_file;
using lockstep::testing::write_file;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// Expects the message and the exit code of a mistake, and that no rank has started.
void expect_refused(Launched run, const std::vector<std::string>& parts) {
  EXPECT_EQ(run.wait(milliseconds(60'000)), 2) << parts[0];
  for (const std::string& part : parts) EXPECT_THAT(run.error(), HasSubstr(part));
  EXPECT_EQ(count(run.error(), "lockstep: "), 1) << run.error();
  EXPECT_EQ(run.output(), "");
  EXPECT_THAT(run.error(), AllOf(Not(HasSubstr("[0]")), Not(HasSubstr("rank 0"))));
}

// Starts two ranks with the config as it is now and these settings; rank 1 has one more setting.
Launched two_ranks_of(Training& training, const std::vector<std::string>& all,
                      const std::string& of_one, const std::string& output = "run") {
  std::string words;
  for (const std::string& word : training.command(output)) words += word + " ";
  for (const std::string& setting : all) words += "--set " + setting + " ";
  return Launched({LOCKSTEP_PROGRAM, "run", "--nproc-per-node", "2", "sh", "-c",
                   "[ $RANK = 0 ] || more='--set " + of_one + "'; exec " + words + "$more"});
}

TEST(BadInput, Commands) {
  const auto command = [](std::vector<std::string> words) {
    words.insert(words.begin(), {LOCKSTEP_PROGRAM, "train"});
    return Launched(std::move(words));
  };
  Training training;
  const std::string config = training.command()[2];
  expect_refused(command({}), {"no config file was given", "docs/config.md"});
  expect_refused(command({"--nproc_per_nod", "2"}), {"did you mean '--nproc-per-node'"});
  expect_refused(command({config, "--set", "optimizer.params.lrr=1"}),
                 {"--set optimizer.params.lrr=1", "did you mean 'lr'"});
  expect_refused(command({config, "--set", "max_steps"}), {"--set max_steps", "<key>=<value>"});
  expect_refused(command({config, "--set"}), {"needs a value"});
  expect_refused(command({config, config}), {"takes no argument"});
  expect_refused(command({config, "--nproc-per-node", "0"}), {"--nproc-per-node is '0'"});
  expect_refused(command({"/nowhere/config.json"}), {"/nowhere/config.json", "No such file"});
  expect_refused(command({"/tmp"}), {"'/tmp'", "folder", "config file"});
  expect_refused(command({"/dev/null"}), {"'/dev/null'", "config file"});
  expect_refused(command({config, "--set", "optimizer=1"}), {"optimizer is 1"});
  expect_refused(command({config, "--set", "data.train=nope.txt"}), {"current folder"});
  EXPECT_FALSE(fs::exists(training.folder() / "runs"));
}

TEST(BadInput, Configs) {
  struct Case {
    const char* pointer;
    nlohmann::json value;
    int num_ranks;
    std::vector<std::string> parts;
  };
  Training training;
  training.command();
  write_file(training.folder() / "empty.txt", "");
  write_file(training.folder() / "short.txt", "too short");
  write_file(training.folder() / "odd.bin", std::string(1001, 'x'));
  const std::string blocked = (training.text() / "run").string();
  // Together with micro-batches of 1, this fits 4 ranks only.
  training.set("/gradient_accumulation_steps", 2);
  const nlohmann::json before = training.config;
  for (const Case& one : {
           Case{"/data/train", "none.txt", 1, {"data.train", "none.txt", "cannot be found"}},
           Case{"/data/train", "empty.txt", 1, {"data.train", "empty.txt", "is empty"}},
           Case{"/data/train", "short.txt", 1, {"data.train", "9 bytes", "17 tokens"}},
           Case{"/data/train", ".", 1, {"data.train", "is a folder"}},
           Case{"/data/trian", "text.txt", 1, {"data.trian", "did you mean 'train'"}},
           Case{"/model/num_heads", 3, 1, {"model.hidden_size is 16", "3 heads"}},
           Case{"/model/hidden_size", 1'000'000, 1, {"parameters", "GiB", "model.hidden_size"}},
           Case{"/model/hidden_size", -4, 1, {"model.hidden_size is -4"}},
           Case{"/model/vocab_size", 50, 1, {"model.vocab_size is 50", "text.txt"}},
           Case{"/train_micro_batch_size_per_gpu", 1, 3, {"train_batch_size 8", "× 3 ranks = 6"}},
           Case{"/data/sequence_length", 4000, 1, {"data.train", "4001 tokens"}},
           Case{"/data/validation_fraction", 0.9999, 1, {"validation"}},
           Case{"/checkpoint/resume", "/nowhere", 1, {"checkpoint.resume", "/nowhere"}},
           Case{"/data/train", "odd.bin", 1, {"odd.bin", "'text'"}},
           Case{"/scheduler/params",
                nlohmann::json::object(),
                1,
                {"scheduler.params.warmup_num_steps", "1000", "12 steps"}},
       }) {
    training.config = before;
    training.set(one.pointer, one.value);
    SCOPED_TRACE(one.pointer);
    expect_refused(training.start(one.num_ranks), one.parts);
    EXPECT_FALSE(fs::exists(training.output()));
  }
  training.config = before;
  expect_refused(training.start(1, "text.txt"), {"output is", "is a file"});
  if (::geteuid() != 0) {
    ::chmod(training.folder().c_str(), 0555);
    expect_refused(training.start(1), {"output is", "nothing can be written"});
    ::chmod(training.folder().c_str(), 0755);
    ::chmod(training.text().c_str(), 0);
    expect_refused(training.start(1), {"data.train", "cannot be read"});
  }
}

// Ranks that another launcher has started read the config themselves; they report the same.
TEST(BadInput, IsToldInOneRound) {
  Training training;
  std::vector<std::string> words = training.command();
  words.insert(words.begin(), {LOCKSTEP_PROGRAM, "run", "--nproc-per-node", "2"});
  for (const char* setting : {"seed=x", "parallel.tensor=3", "model.vocab_size=50"})
    words.insert(words.end(), {"--set", setting});
  Launched run(std::move(words));
  EXPECT_EQ(run.wait(milliseconds(60'000)), 2) << run.error();
  EXPECT_THAT(run.error(), AllOf(HasSubstr(" has 3 mistakes:"), HasSubstr("seed is \"x\""),
                                 HasSubstr("cannot be shared by 3 ranks"),
                                 HasSubstr("model.vocab_size is 50: token")));
}

TEST(BadInput, HidesNothingBehindAnotherMistake) {
  Training training;
  const auto told = [&](int num_ranks, std::initializer_list<const char*> settings) {
    std::vector<std::string> words = training.command();
    words.insert(words.begin(),
                 {LOCKSTEP_PROGRAM, "run", "--nproc-per-node", std::to_string(num_ranks)});
    for (const char* setting : settings) words.insert(words.end(), {"--set", setting});
    Launched run(std::move(words));
    EXPECT_EQ(run.wait(milliseconds(60'000)), 2) << run.error();
    return run.error();
  };
  EXPECT_THAT(told(3, {"parallel.timeline_step=99", "parallel.tensor=2"}),
              AllOf(HasSubstr(" has 2 mistakes:"), HasSubstr("parallel.timeline_step"),
                    HasSubstr("3 ranks")));
  EXPECT_THAT(told(1, {"model.max_positions=2", "model.vocab_size=50"}),
              AllOf(HasSubstr(" has 2 mistakes:"), HasSubstr("max_positions is 2"),
                    HasSubstr("model.vocab_size is 50: token")));
}

TEST(BadInput, AModelFromACheckpointThatLostAFileIsNamed) {
  Training training;
  training.train(1);
  const fs::path checkpoint = training.checkpoint();
  fs::remove(checkpoint / "manifest.json");
  training.config["model"] = {{"from", checkpoint.string()}};
  expect_refused(training.start(1, "other"),
                 {checkpoint.string() + "' has lost its manifest.json"});
}

// This happens if one host has an older config, or another file of the same name.
TEST(BadInput, RanksThatWereToldDifferentThings) {
  struct Case {
    std::vector<std::string> all;
    std::string of_one;
    std::string part;
  };
  Training training;
  std::string other = read_file(training.text());
  std::ranges::reverse(other);
  write_file(training.folder() / "other.txt", other);
  const std::vector<Case> cases = {
      {{}, "seed=77", "rank 1: seed is 77"},
      {{"parallel.pipeline=2"}, "optimizer.params.lr=0.5", "rank 1: optimizer.params.lr is 0.5"},
      {{"parallel.tensor=2"}, "max_steps=7", "max_steps is 7"},
      {{"parallel.context=2"}, "data.sequence_length=4", "data.sequence_length is 4"},
      {{}, "data.train=" + (training.folder() / "other.txt").string(), "the training data has "},
      {{"parallel.tensor=2"}, "parallel.tensor=1", "rank 0: model_parallel is tensor 2"},
  };
  for (const Case& one : cases) {
    SCOPED_TRACE(one.of_one);
    Launched run = two_ranks_of(training, one.all, one.of_one);
    EXPECT_EQ(run.wait(milliseconds(60'000)), 2) << run.error();
    EXPECT_THAT(run.error(),
                AllOf(HasSubstr("ranks were told different things"), HasSubstr(one.part)));
    EXPECT_EQ(count(run.output(), "step "), 0) << run.output();
  }
}

// Each host may have its copy anywhere, but the contents must be the same.
TEST(BadInput, HostsWithAnOlderCopyOfAFile) {
  Training training;
  training.train(1);
  const fs::path model = training.folder() / "model", moved = training.folder() / "moved",
                 older = training.folder() / "older";
  Launched exported(
      {LOCKSTEP_PROGRAM, "ckpt", "export", training.output().string(), model.string()});
  ASSERT_EQ(exported.wait(), 0) << exported.error();
  fs::copy(model, moved);
  fs::copy(model, older);
  ASSERT_TRUE(fs::remove(older / "lockstep-hashes.json"));  // changed on purpose
  auto changed = nlohmann::json::parse(read_file(older / "config.json"));
  changed["n_head"] = 1;
  write_file(older / "config.json", changed.dump());
  training.config["model"] = {{"from", model.string()}};
  Launched same = two_ranks_of(training, {}, "model.from=" + moved.string(), "moved");
  EXPECT_EQ(same.wait(milliseconds(60'000)), 0) << same.error();
  Launched other = two_ranks_of(training, {}, "model.from=" + older.string(), "older");
  EXPECT_EQ(other.wait(milliseconds(60'000)), 2);
  EXPECT_THAT(other.error(), AllOf(HasSubstr("ranks were told different things"),
                                   HasSubstr("rank 1: the model's n_head is 1\n")));
  // If the tensors are another model's, that is found before a rank starts.
  changed["n_layer"] = 1;
  write_file(older / "config.json", changed.dump());
  expect_refused(training.start(1, "layers", {"--set", "model.from=" + older.string()}),
                 {older.string(), "12 that the config.json does not account for",
                  "'transformer.h.1.attn.c_attn.bias' [48]"});

  const auto schedule = [&](const char* kind) {
    const std::string file = training.folder() / (std::string(kind) + ".json");
    Launched made({LOCKSTEP_PROGRAM, "plan", "schedule", "--kind", kind, "--stages", "2",
                   "--micro-batches", "2", "--write", file});
    EXPECT_EQ(made.wait(), 0) << made.error();
    return "parallel.schedule_file=" + file;
  };
  Launched pipelines = two_ranks_of(
      training, {"parallel.pipeline=2", "gradient_accumulation_steps=2", schedule("gpipe")},
      schedule("1f1b"), "piped");
  EXPECT_EQ(pipelines.wait(milliseconds(60'000)), 2);
  EXPECT_THAT(pipelines.error(),
              AllOf(HasSubstr("ranks were told different things"), HasSubstr("the schedule's ")));
}

TEST(BadInput, CheckpointsOfOtherRuns) {
  Training training;
  training.train(1);
  const nlohmann::json before = training.config;
  const std::string weights = training.weights();
  training.set("/model/hidden_size", 32).set("/model/num_layers", 1);
  expect_refused(training.start(2),
                 {"model.hidden_size is 32, was 16", "model.num_layers is 1, was 2",
                  "--set output=FOLDER", training.checkpoint().string()});
  training.config = before;
  expect_refused(training.set("/model/family", "llama").start(1),
                 {"model.family is llama, was gpt2"});
  training.config = before;
  expect_refused(training.set("/seed", 5).start(1), {"seed is 5, was 1234"});
  training.config = before;
  expect_refused(training.set("/optimizer/type", "SGD").start(1),
                 {"is SGD without state, was AdamW with exp_avg and exp_avg_sq"});
  training.config = before;
  const std::string text = read_file(training.text());
  std::string other = text;
  other[other.size() / 3] ^= 1;
  write_file(training.text(), other);
  expect_refused(training.start(1), {"the training data has other tokens"});
  write_file(training.text(), text);
  std::ofstream(training.text(), std::ios::app) << std::string(400, 'x');
  expect_refused(training.start(1), {"the training data has", "had"});
  EXPECT_EQ(training.weights(), weights);
}

TEST(BadInput, DamagedCheckpoints) {
  Training training;
  training.set("/checkpoint/interval", 5);
  training.train(1);
  const fs::path newest = training.checkpoint();
  const fs::path kept = training.folder() / "kept";
  fs::copy(training.output(), kept, fs::copy_options::recursive);
  const std::string weights = training.weights();
  for (const char* file : {"shard-00000.safetensors", "config.json", "manifest.json"}) {
    std::string bad = read_file(newest / file);
    bad[bad.size() / 2] = static_cast<char>(bad[bad.size() / 2] ^ 1);
    write_file(newest / file, bad);
    Launched run = training.start(1);
    EXPECT_EQ(run.wait(milliseconds(60'000)), 0) << run.error();
    EXPECT_THAT(run.error(), AllOf(HasSubstr((newest.filename() / file).string()),
                                   HasSubstr("damaged"), HasSubstr("the one before is used")));
    EXPECT_TRUE(fs::exists(training.output() / "checkpoints/damaged-step-00000012")) << file;
    EXPECT_EQ(training.weights(), weights) << file;
    fs::remove_all(training.output());
    fs::copy(kept, training.output(), fs::copy_options::recursive);
  }
  for (const auto& one : fs::directory_iterator(training.output() / "checkpoints"))
    fs::resize_file(one.path() / "shard-00000.safetensors", 100);
  for (const char* attempt : {"first", "requeued"}) {
    SCOPED_TRACE(attempt);
    expect_refused(training.start(1), {"step-00000012/shard-00000.safetensors", "has 100 bytes",
                                       "no older one that is whole"});
  }
  fs::remove_all(training.output() / "checkpoints");
  expect_refused(training.start(1), {"step 12 of a run was saved in", "--set output=FOLDER"});
  expect_refused(training.start(1, "run", {"--set", "checkpoint.resume=never"}),
                 {"of a run was saved in", "--set output=FOLDER"});
}

// If one rank cannot read its own part, all ranks go back together.
TEST(BadInput, DamagedRandomNumbersOfOneRank) {
  Training training;
  training.set("/checkpoint/interval", 5);
  training.train(2);
  const std::string weights = training.weights();
  const fs::path path = training.checkpoint();
  bool found = false;
  for (const char* name : {"shard-00000.safetensors", "shard-00001.safetensors"}) {
    std::string bytes = read_file(path / name);
    const checkpoint::SafetensorsFile file(path / name);
    const auto* const entry = file.find("generators/rank1/cpu");
    if (entry == nullptr) continue;
    found = true;
    const auto offset = bytes.size() - file.entries().back().end + entry->begin;
    bytes[offset + 9] ^= 1;
    write_file(path / name, bytes);
  }
  ASSERT_TRUE(found);
  Launched run = training.start(2);
  EXPECT_EQ(run.wait(milliseconds(60'000)), 0) << run.error();
  EXPECT_THAT(run.error(),
              AllOf(HasSubstr("generators/rank1/cpu"), HasSubstr("the one before is used")));
  EXPECT_EQ(training.weights(), weights);
}

TEST(FullDisk, IsFoundBeforeTrainingWhereItIsTooSmallForAnyCheckpoint) {
  const lockstep::testing::TinyDisk disk("128k");
  if (!disk.mounted()) GTEST_SKIP() << "only root can mount a small disk";
  Training training;
  training.set("/model/hidden_size", 64);
  expect_refused(training.start(2, (disk / "run").string()),
                 {"a checkpoint of this run takes", "MiB left", "another output"});
}

TEST(FullDisk, CostsACheckpointOfTheMiddleAndFailsAtTheEnd) {
  const lockstep::testing::TinyDisk disk(
      "144k");  // enough for a checkpoint's tensors, but not for all of it
  if (!disk.mounted()) GTEST_SKIP() << "only root can mount a small disk";
  Training training;
  training.set("/checkpoint/interval", 5);
  Launched run = training.start(2, (disk / "run").string());
  EXPECT_EQ(run.wait(milliseconds(60'000)), 3) << run.error();
  EXPECT_EQ(count(run.error(), "no checkpoint of step 5"), 1) << run.error();
  EXPECT_EQ(count(run.error(), "no checkpoint of step 10"), 1);
  EXPECT_THAT(run.error(), HasSubstr("Training goes on"));
  EXPECT_EQ(count(run.error(), "the last checkpoint, of step 12, could not be written"), 1);
  EXPECT_THAT(run.output(), HasSubstr("step 12/12"));
  EXPECT_THAT(run.output(), Not(HasSubstr("done at step")));
  EXPECT_FALSE(fs::exists(disk / "run/checkpoints/step-00000012"));
}

TEST(BadInput, CheckpointsOfOtherPrograms) {
  Training training;
  training.train(1);
  // A user's own program leaves such a checkpoint: whole, but without a language model's config.
  const fs::path checkpoint = training.checkpoint();
  auto manifest = checkpoint::CheckpointReader(checkpoint).manifest();
  ASSERT_EQ(manifest.files.erase("config.json"), 1u);
  write_file(checkpoint / "manifest.json", to_text(manifest));
  fs::remove(checkpoint / "config.json");
  expect_refused(training.start(1), {"of another model or program", "--set output=FOLDER"});
  Launched text = sample({training.output().string()});
  EXPECT_EQ(text.wait(), 2);
  EXPECT_THAT(text.error(), HasSubstr("of another model or program"));
}

TEST(BadInput, ARunsFolderInPlaceOfACheckpoint) {
  Training training;
  training.train(1);
  const std::string run = training.output().string();
  const std::string newest = training.checkpoint().string();
  expect_refused(training.start(1, "other", {"--set", "checkpoint.resume=" + run}),
                 {"the folder of a run", newest});
  training.config["model"] = {{"from", run}};
  expect_refused(training.start(1, "other"), {"model.from", "the folder of a run", newest});
  training.config["model"] = {{"from", newest}};
  training.set("/data/sequence_length", 32);
  Launched longer = training.start(1, "other");
  EXPECT_EQ(longer.wait(), 2);
  EXPECT_THAT(longer.error(), HasSubstr("data.sequence_length smaller"));
  EXPECT_THAT(longer.error(), Not(HasSubstr("max_positions")));
}

TEST(BadInput, WeightsThatLostABit) {
  Training training;
  training.train(1);
  const fs::path file = training.checkpoint() / "shard-00000.safetensors";
  std::string weights = read_file(file);
  const auto head = checkpoint::CheckpointReader(training.checkpoint())
                        .manifest()
                        .files.at("shard-00000.safetensors")
                        .head_bytes;
  for (std::size_t at = head; at < weights.size(); at += 64) weights[at] ^= 1;
  write_file(file, weights);
  Launched text = sample({training.output().string()});
  EXPECT_EQ(text.wait(), 2);
  EXPECT_THAT(text.error(), HasSubstr("shard-00000.safetensors"));
  EXPECT_EQ(text.output(), "");
  training.config["model"] = {{"from", training.checkpoint().string()}};
  Launched run = training.start(1, "other");
  EXPECT_EQ(run.wait(), 2) << run.error();
  EXPECT_THAT(run.error(), HasSubstr("shard-00000.safetensors"));
}

}  // namespace
}  // namespace lockstep::train::testing
