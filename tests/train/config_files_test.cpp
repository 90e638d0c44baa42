#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/stat.h>
#include <unistd.h>

#include "tests/base/files.h"
#include "tests/train/configs.h"

namespace lockstep::train {

namespace {

using lockstep::testing::TemporaryFolder;
using lockstep::testing::write_file;
using ::testing::HasSubstr;

// Root may read and write everything: if the tests run as root, they give that up for a while.
class AsNobody {
 public:
  explicit AsNobody(const std::filesystem::path& folder) {
    ::chmod(folder.c_str(), 0777);
    if (::geteuid() == 0) became_nobody_ = ::seteuid(65534) == 0;
  }
  ~AsNobody() {
    if (became_nobody_) {
      EXPECT_EQ(::seteuid(0), 0);
    }
  }
  AsNobody(const AsNobody&) = delete;
  AsNobody& operator=(const AsNobody&) = delete;

 private:
  bool became_nobody_ = false;
};

// A folder with a config and its data.
class ConfigFiles : public ::testing::Test {
 protected:
  ConfigFiles() { write_file(folder_ / "input.txt", std::string(1000, 'x')); }

  TrainConfig load(std::initializer_list<Change> changes) {
    std::filesystem::remove(folder_ / "gpt.json");
    write_file(folder_ / "gpt.json", text_with(changes));
    return load_config(folder_ / "gpt.json");
  }

  // Returns the error, with $ in place of the test's folder.
  std::string mistake(std::initializer_list<Change> changes) {
    std::string text = usage_error([&] { load(changes); });
    const std::string path = folder_.path().string();
    for (auto at = text.find(path); at != std::string::npos; at = text.find(path))
      text.replace(at, path.size(), "$");
    return text;
  }

  TemporaryFolder folder_;
};

TEST_F(ConfigFiles, are_found_beside_the_config) {
  const TrainConfig config = load({});
  EXPECT_EQ(config.data.train.front(), folder_ / "input.txt");
  EXPECT_EQ(config.output, folder_ / "runs/gpt");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "runs")) << "reading a config writes nothing";
}

TEST_F(ConfigFiles, may_be_overridden_by_flags) {
  write_file(folder_ / "gpt.json", text_with({}));
  EXPECT_EQ(load_config(folder_ / "gpt.json", {"seed=5"}).seed, 5);
}

TEST_F(ConfigFiles, that_are_not_there_are_named) {
  EXPECT_EQ(mistake({{"/data/train", "inptu.txt"}}),
            "$/gpt.json:1: data.train names '$/inptu.txt', which cannot be found (No such file or "
            "directory): check the path; one that is relative starts from the config's folder");
  EXPECT_EQ(mistake({{"/data/train", {"input.txt", "b.txt"}}}),
            "$/gpt.json:1: data.train[1] names '$/b.txt', which cannot be found (No such file or "
            "directory): check the path; one that is relative starts from the config's folder");
  EXPECT_THAT(mistake({{"/data/validation", "v.txt"}}),
              HasSubstr("data.validation names '$/v.txt'"));
  EXPECT_EQ(usage_error([&] { load_config("/nowhere/gpt.json"); }),
            "cannot open '/nowhere/gpt.json': No such file or directory");
}

TEST_F(ConfigFiles, that_cannot_be_trained_on_are_named) {
  write_file(folder_ / "empty.txt", "");
  EXPECT_EQ(mistake({{"/data/train", "empty.txt"}}),
            "$/gpt.json:1: data.train names '$/empty.txt', which is empty: there is nothing in it "
            "to train on");
  EXPECT_EQ(mistake({{"/data/train", "."}}),
            "$/gpt.json:1: data.train names '$/', which is a folder: name the files in it");
  ASSERT_EQ(::mkfifo((folder_ / "pipe").c_str(), 0600), 0);
  EXPECT_EQ(mistake({{"/data/train", "pipe"}}),
            "$/gpt.json:1: data.train names '$/pipe', which is no plain file: a pipe or a device "
            "cannot be trained on");
  EXPECT_EQ(mistake({{"/data/sequence_length", 1000}}),
            "$/gpt.json:1: data.train has 1000 bytes in all, too few for one sample of "
            "data.sequence_length + 1 = 1001 tokens");
}

TEST_F(ConfigFiles, that_may_not_be_read_are_named) {
  ::chmod((folder_ / "input.txt").c_str(), 0);
  const AsNobody nobody(folder_.path());
  EXPECT_EQ(mistake({}),
            "$/gpt.json:1: data.train names '$/input.txt', which cannot be read (Permission "
            "denied): change its permissions");
}

TEST_F(ConfigFiles, of_megatron_come_in_pairs) {
  write_file(folder_ / "tokens.bin", std::string(1000, 'x'));
  EXPECT_THAT(mistake({{"/data/train", "tokens"}}),
              HasSubstr("'$/tokens.idx', which cannot be found"));
  EXPECT_THAT(mistake({{"/data/train", "tokens.bin"}, {"/data/format", "megatron"}}),
              HasSubstr("'$/tokens.idx', which cannot be found"));
  load({{"/data/train", "tokens.bin"}});
  write_file(folder_ / "tokens.idx", std::string(100, 'x'));
  load({{"/data/train", "tokens"}});
  load({{"/data/train", "tokens.idx"}});
  load({{"/data/train", "tokens"}, {"/data/format", "megatron"}});
}

// Runs in a process of its own, because the table of formats keeps the added format.
TEST_F(ConfigFiles, may_have_a_format_that_the_program_added) {
  const auto run = [&] {
    data::add_token_format({.name = "halves",
                            .files =
                                [](const std::filesystem::path& path) {
                                  return std::vector<std::filesystem::path>{path.string() + ".a",
                                                                            path.string() + ".b"};
                                },
                            .recognises = [](const std::filesystem::path&) { return false; },
                            .layout =
                                [](std::span<const data::TokenBytes>) {
                                  return data::TokenLayout(data::TokenType::u8);
                                }});
    const std::initializer_list<Change> changes = {{"/data/train", "tokens"},
                                                   {"/data/format", "halves"}};
    write_file(folder_ / "tokens.a", std::string(500, 'x'));
    const bool finds_the_other =
        mistake(changes).find("'$/tokens.b', which cannot be found") != std::string::npos;
    write_file(folder_ / "tokens.b", std::string(500, 'x'));
    const TrainConfig config = load(changes);
    const bool kept = config.data.format == "halves" &&
                      to_json(config).find("\"format\": \"halves\"") != std::string::npos;
    std::exit(finds_the_other && kept ? 0 : 1);
  };
  EXPECT_EXIT(run(), ::testing::ExitedWithCode(0), "");
  EXPECT_THAT(mistake({{"/data/format", "halves"}}), HasSubstr("data.format is \"halves\""));
}

TEST_F(ConfigFiles, need_a_place_to_write_to) {
  EXPECT_EQ(
      mistake({{"/output", "input.txt/run"}}),
      "$/gpt.json:1: output is '$/input.txt/run', but '$/input.txt' is a file: choose another "
      "folder");
  EXPECT_EQ(mistake({{"/tensorboard/output_path", "input.txt"}}),
            "$/gpt.json:1: tensorboard.output_path is '$/input.txt', but '$/input.txt' is a file: "
            "choose another folder");
  load({{"/tensorboard/output_path", "input.txt"}, {"/tensorboard/enabled", false}});
  EXPECT_THAT(mistake({{"/output", "input"}, {"/csv_monitor/output_path", "input.txt"}}),
              HasSubstr("csv_monitor.output_path is '$/input.txt', but"));
  std::filesystem::create_directory(folder_ / "locked");
  ::chmod((folder_ / "locked").c_str(), 0500);
  const AsNobody nobody(folder_.path());
  EXPECT_EQ(mistake({{"/output", "locked/deep/run"}}),
            "$/gpt.json:1: output is '$/locked/deep/run', but nothing can be written in '$/locked' "
            "(Permission denied): choose another folder");
}

TEST_F(ConfigFiles, of_a_model_are_safetensors) {
  const std::initializer_list<Change> from = {{"/model", {{"from", "gpt2"}}}};
  EXPECT_EQ(mistake(from),
            "$/gpt.json:1: model.from names '$/gpt2', which is not there: check the path");
  std::filesystem::create_directory(folder_ / "gpt2");
  EXPECT_EQ(mistake(from), "$/gpt.json:1: model.from names '$/gpt2', which has no config.json");
  write_file(folder_ / "gpt2/config.json", "{}");
  EXPECT_EQ(mistake(from),
            "$/gpt.json:1: model.from names '$/gpt2', which has no model.safetensors");
  write_file(folder_ / "gpt2/pytorch_model.bin", "x");
  EXPECT_EQ(
      mistake(from),
      "$/gpt.json:1: model.from names '$/gpt2', which has its weights in pytorch_model.bin, a "
      "pickle, which Lockstep never opens: save them as safetensors");
  write_file(folder_ / "gpt2/model.safetensors.index.json", "{}");
  EXPECT_EQ(load(from).model.from, folder_ / "gpt2");
}

TEST_F(ConfigFiles, to_resume_from_must_be_there) {
  EXPECT_EQ(mistake({{"/checkpoint/resume", "yes"}}),
            "$/gpt.json:1: checkpoint.resume names '$/yes', which is not there: it must be "
            "\"auto\", \"never\" or the folder of a checkpoint");
}

// The run has since removed it as one of its older checkpoints; everything else must be there.
TEST_F(ConfigFiles, that_a_run_began_from_may_be_gone_when_it_is_under_way) {
  write_file(folder_ / "gpt.json", text_with({{"/checkpoint/resume", "step-00000100"}}));
  EXPECT_EQ(load_config(folder_ / "gpt.json", {}, NamedFiles::of_run_under_way).checkpoint.resume,
            Resume::from);
  EXPECT_THAT(usage_error([&] {
                load_config(folder_ / "gpt.json", {"data.train=none.txt"},
                            NamedFiles::of_run_under_way);
              }),
              HasSubstr("none.txt"));
}

}  // namespace

}  // namespace lockstep::train
