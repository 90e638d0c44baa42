#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/base/durable_file.h>

#include "files.h"

namespace lockstep {
namespace {

using ::testing::HasSubstr;

TEST(DurableFile, AppearsAtCommit) {
  const testing::TemporaryFolder folder;
  testing::write_file(folder / "file", "old");
  DurableFile file(folder / "file");
  file.write("ne");
  file.write("w");
  EXPECT_EQ(testing::read_file(folder / "file"), "old");
  file.commit();
  EXPECT_EQ(testing::read_file(folder / "file"), "new");
}

TEST(DurableFile, LeavesNothingBehindWithoutCommit) {
  const testing::TemporaryFolder folder;
  { DurableFile(folder / "file").write("half"); }
  EXPECT_TRUE(is_empty(folder.path()));
}

TEST(DurableFile, NamesTheFileAndTheReason) {
  const testing::TemporaryFolder folder;
  try {
    write_durably(folder / "no" / "file", "text");
    FAIL() << "a file in a folder that is not there was written";
  } catch (const FileError& error) {
    EXPECT_THAT(error.what(), HasSubstr("no/file': No such file or directory"));
  }
}

// A device that is full, as every Linux has one.
TEST(DurableFile, AFullDiskIsAnErrorThatLeavesNothing) {
  const testing::TemporaryFolder folder;
  std::filesystem::create_symlink("/dev/full", folder / "file.part");
  try {
    write_durably(folder / "file", "text");
    FAIL() << "a full disk took a file";
  } catch (const FileError& error) {
    EXPECT_THAT(error.what(), HasSubstr("No space left"));
  }
  EXPECT_TRUE(is_empty(folder.path()));
}

}  // namespace
}  // namespace lockstep
