// `lockstep ckpt`, as a user runs it, on checkpoints of no particular model. tests/train/run has
// those of a training.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include <lockstep/checkpoint/format/folder.h>

#include "../base/files.h"
#include "../checkpoint/pieces.h"
#include "launched.h"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;
using launch::testing::Launched;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::Placement;
using testing::TemporaryFolder;

// Exit code and output.
std::pair<int, std::string> ckpt(std::vector<std::string> words) {
  words.insert(words.begin(), {LOCKSTEP_PROGRAM, "ckpt"});
  Launched run(std::move(words));
  const int code = run.wait();
  return {code, run.output() + run.error()};
}

// A run with two checkpoints, of which the newer was damaged and set aside.
class SetAside : public ::testing::Test {
 protected:
  SetAside() {
    std::mt19937 random(3);
    for (const std::int64_t step : {5, 10})
      testing::write_checkpoint(
          checkpoints() / checkpoint::checkpoint_name(step),
          {{"model/a", testing::random_tensor(checkpoint::DType::f32, {64}, random)}},
          {{"model/a", {Placement::full({64})}}}, 1);
  }

  fs::path run() const { return folder_ / "run"; }
  fs::path checkpoints() const { return run() / "checkpoints"; }
  // The file with the tensors of a checkpoint.
  static fs::path tensors_of(const fs::path& checkpoint) {
    return checkpoint / checkpoint::piece_file_name(0);
  }
  fs::path set_newest_aside() const {
    return checkpoint::set_aside(*checkpoint::newest_checkpoint(checkpoints()));
  }

  TemporaryFolder folder_;
};

TEST_F(SetAside, IsNamedWithItsDamage) {
  // A flipped bit, which only shows where all is read.
  const fs::path newest = checkpoints() / checkpoint::checkpoint_name(10);
  std::string bytes = testing::read_file(tensors_of(newest));
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  testing::write_file(tensors_of(newest), bytes);
  const std::string aside = set_newest_aside().string();

  const auto [code, text] = ckpt({"verify", run().string()});
  EXPECT_EQ(code, 1) << text;
  EXPECT_THAT(text, AllOf(HasSubstr("step-00000005' is whole"),
                          HasSubstr("'" + aside +
                                    "' was found damaged when a run was resumed, "
                                    "and set aside"),
                          HasSubstr("model/a"), Not(HasSubstr(aside + "' is whole"))));

  EXPECT_THAT(ckpt({"ls", run().string()}).second,
              HasSubstr("'" + aside + "' was found damaged when a run was resumed, and set aside"));

  const auto listed = nlohmann::json::parse(ckpt({"ls", "--json", run().string()}).second);
  ASSERT_EQ(listed.size(), 2u) << listed;
  EXPECT_EQ(listed[0]["step"], 5);
  EXPECT_EQ(listed[0]["set_aside"], false);
  EXPECT_TRUE(listed[0]["damage"].is_null());
  EXPECT_EQ(listed[1]["step"], 10);
  EXPECT_EQ(listed[1]["path"], aside);
  EXPECT_EQ(listed[1]["set_aside"], true);
  EXPECT_THAT(listed[1]["damage"].get<std::string>(), HasSubstr("set aside"));
}

TEST_F(SetAside, TellsADamageThatShowsAtOnce) {
  fs::resize_file(tensors_of(checkpoints() / checkpoint::checkpoint_name(10)), 100);
  set_newest_aside();
  const auto listed = nlohmann::json::parse(ckpt({"ls", "--json", run().string()}).second);
  EXPECT_THAT(listed[1]["damage"].get<std::string>(), HasSubstr("has 100 bytes")) << listed;
  EXPECT_THAT(ckpt({"ls", run().string()}).second, HasSubstr("has 100 bytes"));
}

// The disk, not the checkpoint, was at fault; or somebody has mended it.
TEST_F(SetAside, MayBeWholeNow) {
  const std::string aside = set_newest_aside().string();
  const auto [code, text] = ckpt({"verify", run().string()});
  EXPECT_EQ(code, 0) << text;
  EXPECT_THAT(text, AllOf(HasSubstr("'" + aside + "' is whole"),
                          HasSubstr("rename it to step-00000010 to use it again")));
}

TEST_F(SetAside, MayBeAllThatThereIs) {
  fs::remove_all(checkpoints() / checkpoint::checkpoint_name(5));
  fs::resize_file(tensors_of(checkpoints() / checkpoint::checkpoint_name(10)), 100);
  const std::string aside = set_newest_aside().string();
  const auto [code, text] = ckpt({"verify", run().string()});
  EXPECT_EQ(code, 1) << text;
  EXPECT_THAT(text, HasSubstr(aside));
}

}  // namespace
}  // namespace lockstep::cli
