#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/base/durable_file.h>
#include <lockstep/checkpoint/format/folder.h>

#include "../base/errors.h"
#include "../base/files.h"

namespace lockstep::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::read_file;
using testing::TemporaryFolder;
using ::testing::UnorderedElementsAre;
using testing::write_file;

fs::path write_checkpoint(const fs::path& folder, std::int64_t step, const std::string& text) {
  CheckpointWriter writer(folder, step);
  write_file(writer.path() / "data", text);
  write_file(writer.path() / kManifestFile, "{}");
  return writer.commit();
}

// Makes a folder as a killed writer, or another program, may have left it.
void make_folder(const fs::path& folder, const std::vector<std::string>& files) {
  create_directories(folder);
  for (const std::string& file : files) write_file(folder / file, "");
}

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder))
    names.push_back(entry.path().filename().string());
  return names;
}

std::vector<std::int64_t> steps_in(const fs::path& folder) {
  std::vector<std::int64_t> steps;
  for (const Checkpoint& checkpoint : list_checkpoints(folder)) steps.push_back(checkpoint.step);
  return steps;
}

TEST(CheckpointFolder, AppearsAtCommitWithAllItsFiles) {
  const TemporaryFolder folder;
  const fs::path run = folder / "runs" / "first";
  CheckpointWriter writer(run, 500);
  write_file(writer.path() / "data", "numbers");
  create_directory(writer.path() / "more");
  write_file(writer.path() / "more" / "data", "numbers");
  write_file(writer.path() / kManifestFile, "{}");
  EXPECT_FALSE(exists(run / "step-00000500"));
  EXPECT_THAT(list_checkpoints(run), ElementsAre());
  EXPECT_EQ(writer.commit(), run / "step-00000500");
  EXPECT_THAT(names_in(run), ElementsAre("step-00000500"));
  EXPECT_EQ(read_file(run / "step-00000500" / "more" / "data"), "numbers");
  EXPECT_EQ(newest_checkpoint(run), (Checkpoint{500, run / "step-00000500"}));
}

TEST(CheckpointFolder, DroppedItLeavesNothingBehind) {
  const TemporaryFolder folder;
  {
    CheckpointWriter writer(folder.path(), 1);
    write_file(writer.path() / "data", "half");
    EXPECT_THAT(usage_error([&] { writer.commit(); }), HasSubstr("has no manifest.json"));
  }
  EXPECT_TRUE(is_empty(folder.path()));
}

TEST(CheckpointFolder, ListsTheCompleteOnesByStep) {
  const TemporaryFolder folder;
  EXPECT_THAT(list_checkpoints(folder / "none"), ElementsAre());
  EXPECT_EQ(newest_checkpoint(folder.path()), std::nullopt);
  for (const std::int64_t step : {20l, 0l, 3l, 123456789012l, 1000l})
    write_checkpoint(folder.path(), step, "");
  make_folder(folder / "damaged-step-00005000", {kManifestFile});
  for (const char* name :
       {"step-7", "step-000000008", "step--0000001", "step-00000009x", "steps", "step-", "x",
        "step-99999999999999999999", ".step-00006000.part-1", ".step-00006000.gone-1"})
    make_folder(folder / name, {kManifestFile});
  write_file(folder / "step-00004000", "a file");
  EXPECT_THAT(steps_in(folder.path()), ElementsAre(0, 3, 20, 1000, 123456789012));
  EXPECT_EQ(newest_checkpoint(folder.path())->step, 123456789012);
}

// A folder that a killed writer left was never complete; a folder that has its final name was.
TEST(CheckpointFolder, OneThatLostItsManifestIsListed) {
  const TemporaryFolder folder;
  write_checkpoint(folder.path(), 3, "");
  make_folder(folder / "step-00005000", {"data"});
  make_folder(folder / ".step-00006000.part-1", {"shard-00000.safetensors"});
  make_folder(folder / "copy", {"shard-00000.safetensors"});
  make_folder(folder / "other", {"data"});
  make_folder(folder / "step-00007000", {"model.safetensors"});  // a model in Hugging Face's form
  EXPECT_THAT(steps_in(folder.path()), ElementsAre(3, 5000));
  for (const char* name : {"step-00000003", "step-00005000", "step-00005000/", "copy"})
    EXPECT_TRUE(is_checkpoint(folder / name)) << name;
  for (const char* name :
       {".step-00006000.part-1", "other", "none", "step-00000003/data", "step-00007000"})
    EXPECT_FALSE(is_checkpoint(folder / name)) << name;
}

TEST(CheckpointFolder, AFolderThatCannotBeReadIsToldApartFromOneThatIsNotThere) {
  const TemporaryFolder folder;
  write_file(folder / "file", "");
  EXPECT_THAT(usage_error([&] { list_checkpoints(folder / "file"); }),
              HasSubstr("cannot read the folder of checkpoints"));
  EXPECT_THAT(usage_error([&] { CheckpointWriter(folder.path(), -1); }), HasSubstr("step -1"));
}

TEST(CheckpointFolder, ReplacesOneOfTheSameStep) {
  const TemporaryFolder folder;
  write_checkpoint(folder.path(), 5, "old");
  write_file(folder / "step-00000005" / "extra", "");
  write_checkpoint(folder.path(), 5, "new");
  EXPECT_THAT(names_in(folder.path()), ElementsAre("step-00000005"));
  EXPECT_THAT(names_in(folder / "step-00000005"), UnorderedElementsAre("data", kManifestFile));
  EXPECT_EQ(read_file(folder / "step-00000005" / "data"), "new");
}

TEST(CheckpointFolder, TheNextWriterRemovesWhatKilledOnesLeft) {
  const TemporaryFolder folder;
  write_checkpoint(folder.path(), 1, "");
  make_folder(folder / ".step-00000002.part-4711", {"data", "data.part"});
  make_folder(folder / ".step-00000003.gone-4711", {"data"});
  make_folder(folder / ".step-00000001.old-4711", {"data", kManifestFile});
  make_folder(folder / ".mine", {"data"});
  make_folder(folder / ".step-x.part-1", {"data"});
  write_checkpoint(folder.path(), 4, "");
  EXPECT_THAT(names_in(folder.path()),
              UnorderedElementsAre("step-00000001", "step-00000004", ".mine", ".step-x.part-1"));
}

// The writer was killed between the two renames that replace a checkpoint.
TEST(CheckpointFolder, AReplacementThatWasNotCompletedLosesNothing) {
  const TemporaryFolder folder;
  write_checkpoint(folder.path(), 1, "");
  write_checkpoint(folder.path(), 2, "numbers");
  rename(folder / "step-00000002", folder / ".step-00000002.old-4711");
  make_folder(folder / ".step-00000002.part-4711", {"data", kManifestFile});
  EXPECT_EQ(newest_checkpoint(folder.path()), (Checkpoint{2, folder / ".step-00000002.old-4711"}));
  write_checkpoint(folder.path(), 3, "");
  EXPECT_THAT(names_in(folder.path()),
              UnorderedElementsAre("step-00000001", "step-00000002", "step-00000003"));
  EXPECT_EQ(read_file(folder / "step-00000002" / "data"), "numbers");
}

TEST(CheckpointFolder, OneWriterAtATime) {
  const TemporaryFolder folder;
  CheckpointWriter writer(folder.path(), 1);
  write_file(writer.path() / kManifestFile, "");
  EXPECT_THAT(usage_error([&] { CheckpointWriter(folder.path(), 2); }),
              HasSubstr("another run writes into"));
  EXPECT_NO_THROW(writer.commit());
}

// The process was stopped while it wrote, and its generation is over.
TEST(CheckpointFolder, NothingIsCommittedByAGenerationThatIsOver) {
  const TemporaryFolder folder;
  const fs::path run = folder / "checkpoints";
  const auto lock_of = [&](int generation) {
    return std::make_shared<const FolderLock>(folder.path(),
                                              FolderHolder{.job = "a", .generation = generation});
  };
  const auto before = lock_of(0);
  const auto write = [&](CheckpointWriter& writer, const std::string& text) {
    write_file(writer.path() / "data", text);
    write_file(writer.path() / kManifestFile, "{}");
  };
  CheckpointWriter stopped(run, 7, before);
  write(stopped, "old");
  const auto now = lock_of(1);
  CheckpointWriter next(run, 7, now);
  write(next, "new");
  EXPECT_THROW(stopped.commit(), CommError);
  EXPECT_THROW(CheckpointWriter(run, 8, before), CommError);
  next.commit();
  EXPECT_THAT(names_in(run), ElementsAre("step-00000007"));
  EXPECT_EQ(read_file(run / "step-00000007" / "data"), "new");
}

TEST(CheckpointFolder, KeepsTheNewest) {
  const TemporaryFolder folder;
  for (std::int64_t step = 1; step <= 5; ++step) write_checkpoint(folder.path(), step, "");
  make_folder(folder / "step-00000009", {"data"});
  EXPECT_THAT(remove_old(folder.path(), 0), ElementsAre());
  EXPECT_THAT(remove_old(folder.path(), 5), ElementsAre());
  EXPECT_EQ(remove_old(folder.path(), 2).size(), 3u);
  EXPECT_THAT(names_in(folder.path()),
              UnorderedElementsAre("step-00000004", "step-00000005", "step-00000009"));
  EXPECT_THAT(usage_error([&] { remove_old(folder.path(), -1); }), HasSubstr("0 keeps all"));
}

TEST(Folder, ADamagedOneIsSetAside) {
  const TemporaryFolder folder;
  for (const int step : {1, 2}) {
    CheckpointWriter writer(folder.path(), step);
    write_file(writer.path() / kManifestFile, "{}");
    writer.commit();
  }
  const auto newest = newest_checkpoint(folder.path());
  EXPECT_EQ(set_aside(*newest), folder / "damaged-step-00000002");
  EXPECT_EQ(newest_checkpoint(folder.path())->step, 1);
  EXPECT_TRUE(exists(folder / "damaged-step-00000002" / kManifestFile)) << "to be looked at";
  // Another checkpoint of the same step gets a name beside it.
  {
    CheckpointWriter writer(folder.path(), 2);
    write_file(writer.path() / kManifestFile, "{}");
    writer.commit();
  }
  EXPECT_EQ(set_aside(*newest_checkpoint(folder.path())), folder / "damaged-step-00000002-2");
  EXPECT_THAT(list_set_aside(folder.path()),
              ElementsAre(Checkpoint{2, folder / "damaged-step-00000002"},
                          Checkpoint{2, folder / "damaged-step-00000002-2"}));
  EXPECT_EQ(steps_in(folder.path()), std::vector<std::int64_t>{1});
}

}  // namespace
}  // namespace lockstep::checkpoint
