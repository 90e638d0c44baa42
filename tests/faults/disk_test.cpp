// Row 9: disks are full, read-only or broken while a checkpoint is written beside training.
#include <sys/mount.h>

#include <gmock/gmock.h>

#include <functional>

#include <lockstep/checkpoint/format/folder.h>
#include <lockstep/checkpoint/format/reader.h>

#include "disturbed.h"
#include "tests/base/files.h"

namespace lockstep::faults {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class Row09Disk : public DisturbedTraining {
 protected:
  // For a while in the middle no checkpoint can be written. Training goes on, the user is told, and
  // earlier checkpoints stay; once the disk works again, checkpoints are written again.
  void expect_training_goes_on(const Words& variables, const std::function<void()>& break_it,
                               const std::function<void()>& mend_it, const std::string& why) {
    // Checkpoints of steps 4, 8, 12, …
    Launched job = start({.rank = {"--pace", "40", "--epochs", "6"}, .variables = variables});
    ASSERT_TRUE(launch::testing::eventually(milliseconds(180'000), [&] {
      return checkpoint::newest_checkpoint(checkpoints()).has_value();
    })) << job.error();
    break_it();
    ASSERT_TRUE(launch::testing::eventually(milliseconds(180'000), [&] {
      return job.error().find("no checkpoint of step") != std::string::npos;
    })) << job.error();
    const auto kept = checkpoint::newest_checkpoint(checkpoints());
    ASSERT_TRUE(kept);
    EXPECT_THAT(checkpoint::CheckpointReader(kept->path).damages(), IsEmpty());
    EXPECT_THAT(job.error(), HasSubstr(why));
    EXPECT_THAT(job.error(), HasSubstr("Training goes on"));
    mend_it();
    EXPECT_EQ(job.wait(milliseconds(180'000)), 0) << job.error();
    expect_nothing_left(job);
    EXPECT_THAT(launch::testing::faults_in(job.error()), IsEmpty());
    expect_undisturbed_result(2, {"--epochs", "6"});
    // No half-written checkpoint is left beside the complete ones.
    for (const auto& entry : fs::directory_iterator(checkpoints()))
      EXPECT_THAT(entry.path().filename().string(), ::testing::StartsWith("step-"));
  }

  // Puts the run's checkpoints on a disk of their own, which goes with this process.
  bool mount_disk(const char* options) {
    fs::create_directories(checkpoints());
    return ::unshare(CLONE_NEWNS) == 0 &&
           ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
           ::mount("tmpfs", checkpoints().c_str(), "tmpfs", 0, options) == 0;
  }
  bool set_flags(unsigned long flags) {
    // Remounting fails while a file is open for writing.
    return launch::testing::eventually(milliseconds(60'000), [&] {
      return ::mount(nullptr, checkpoints().c_str(), nullptr, MS_REMOUNT | flags, nullptr) == 0;
    });
  }
  void TearDown() override {
    if (mounted_) ::umount2(checkpoints().c_str(), MNT_DETACH);
  }

  bool mounted_ = false;
};

TEST_F(Row09Disk, Full) {
  mounted_ = mount_disk("size=1m");
  if (!mounted_) GTEST_SKIP() << "only root can mount a disk";
  const fs::path filler = checkpoints() / "step-filler-of-somebody-else";
  expect_training_goes_on(
      {},
      [&] {
        std::ofstream file(filler, std::ios::binary);
        const std::string block(4096, 'x');
        while (file.write(block.data(), static_cast<std::streamsize>(block.size())).flush()) {
        }
      },
      [&] { fs::remove(filler); }, "not enough room in");
}

// There seemed to be enough room when the save began.
TEST_F(Row09Disk, FullInTheMiddle) {
  const fs::path full = files_.folder() / "full";
  expect_training_goes_on(
      with_shim({"SHIM_IO=ENOSPC", "SHIM_IO_PATH=shard-0", "SHIM_IO_FILE=" + full.string()}),
      [&] { lockstep::testing::write_file(full, ""); }, [&] { fs::remove(full); },
      "No space left on device");
}

TEST_F(Row09Disk, ReadOnly) {
  mounted_ = mount_disk("size=1m");
  if (!mounted_) GTEST_SKIP() << "only root can mount a disk";
  expect_training_goes_on(
      {}, [&] { ASSERT_TRUE(set_flags(MS_RDONLY)); }, [&] { ASSERT_TRUE(set_flags(0)); },
      "Read-only file system");
}

TEST_F(Row09Disk, InputOutputErrors) {
  const fs::path broken = files_.folder() / "broken";
  expect_training_goes_on(
      with_shim({"SHIM_IO=EIO", "SHIM_IO_PATH=checkpoints", "SHIM_IO_FILE=" + broken.string()}),
      [&] { lockstep::testing::write_file(broken, ""); }, [&] { fs::remove(broken); },
      "Input/output error");
}

// Each system call of a save fails by itself, on either rank, from the first call on.
class WholeRow09Disk : public Row09Disk {};

TEST_F(WholeRow09Disk, AnErrorOfAnyOneCall) {
  for (const char* rank : {"0", "1"}) {
    const fs::path log = files_.folder() / ("calls-" + std::string(rank));
    // Only files of an unfinished checkpoint fail: before the first step an error would end the
    // run.
    const Words common = {"SHIM_IO_PATH=/.step-", std::string("SHIM_IO_RANK=") + rank};
    const auto with = [&](Words more) {
      more.insert(more.end(), common.begin(), common.end());
      return with_shim(more);
    };
    // Saves after steps 4, 8, 12 and 16, and the last save, which may not fail.
    Launched counted =
        start({.variables = with({"SHIM_IO=NOTHING", "SHIM_IO_LOG=" + log.string()})},
              "counted-" + std::string(rank));
    ASSERT_EQ(counted.wait(milliseconds(180'000)), 0) << counted.error();
    const auto calls = launch::testing::lines_of(lockstep::testing::read_file(log));
    ASSERT_GT(calls.size(), 10u);
    for (std::size_t call = 1; call <= calls.size() / 3; ++call) {
      SCOPED_TRACE("rank " + std::string(rank) + ": " + calls[call - 1]);
      const std::string name = "run-" + std::string(rank) + "-" + std::to_string(call);
      Launched job =
          start({.variables = with({"SHIM_IO=EIO", "SHIM_IO_CALL=" + std::to_string(call)})}, name);
      EXPECT_EQ(job.wait(milliseconds(180'000)), 0) << job.error();
      expect_nothing_left(job);
      expect_undisturbed_result(2, {}, name);
      if (HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace lockstep::faults
