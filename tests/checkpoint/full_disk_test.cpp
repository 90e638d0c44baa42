#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/base/durable_file.h>
#include <lockstep/checkpoint/format/folder.h>

#include "tiny_disk.h"

namespace lockstep::checkpoint {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(FullDisk, LeavesOlderCheckpointsAndNothingHalfWritten) {
  const testing::TinyDisk disk("1m");
  if (!disk.mounted()) GTEST_SKIP() << "mounting a disk needs root";
  const auto run = disk / "run";
  const auto write_checkpoint = [&](std::int64_t step) {
    CheckpointWriter writer(run, step);
    write_durably(writer.path() / "data", std::string(300 << 10, 'x'));
    write_durably(writer.path() / kManifestFile, "{}");
    writer.commit();
  };
  std::int64_t step = 0;
  std::string reason;
  while (reason.empty() && step < 10) {
    try {
      write_checkpoint(step + 1);
      ++step;
    } catch (const FileError& error) {
      reason = error.what();
    }
  }
  EXPECT_EQ(step, 3);
  EXPECT_THAT(reason, AllOf(HasSubstr("data': No space left on device")));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(run), {}), 3);
  EXPECT_EQ(list_checkpoints(run).size(), 3u);
  // Once there is room, saving works again.
  remove_old(run, 1);
  write_checkpoint(4);
  EXPECT_EQ(newest_checkpoint(run)->step, 4);
}

}  // namespace
}  // namespace lockstep::checkpoint
