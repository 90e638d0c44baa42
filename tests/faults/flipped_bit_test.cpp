// Row 11: a run goes on from files in which a bit has flipped.
#include <signal.h>

#include <gmock/gmock.h>

#include <lockstep/checkpoint/format/folder.h>

#include "disturbed.h"
#include "tests/base/files.h"

namespace lockstep::faults {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class Row11FlippedBit : public DisturbedTraining {
 protected:
  // Ends a run in the middle, when it has two checkpoints.
  void end_in_the_middle() {
    Launched job = start({.rank = {"--pace", "20"}});
    ASSERT_TRUE(reaches(14)) << job.error();
    const pid_t rank = process_of_rank(job, 1);
    ASSERT_GT(rank, 0);
    ::kill(rank, SIGKILL);
    EXPECT_EQ(job.wait(milliseconds(180'000)), 128 + SIGKILL);
    expect_nothing_left(job);
    ASSERT_EQ(checkpoint::list_checkpoints(checkpoints()).size(), 2u);
  }
};

TEST_F(Row11FlippedBit, IsNamedAndTheCheckpointBeforeIsUsed) {
  end_in_the_middle();
  if (HasFailure()) return;
  const auto newest = checkpoint::newest_checkpoint(checkpoints());
  for (const std::string file :
       {"shard-00000.safetensors", "shard-00001.safetensors", "manifest.json"}) {
    SCOPED_TRACE(file);
    fs::copy(output(), output(file), fs::copy_options::recursive);
    const fs::path damaged = checkpoints(file) / newest->path.filename() / file;
    std::string bytes = lockstep::testing::read_file(damaged);
    bytes[bytes.size() - bytes.size() / 5] ^= 4;
    lockstep::testing::write_file(damaged, bytes);
    Launched job = start({}, file);
    EXPECT_EQ(job.wait(milliseconds(180'000)), 0) << job.error();
    expect_nothing_left(job);
    EXPECT_THAT(job.error(), HasSubstr((newest->path.filename() / file).string()));
    EXPECT_THAT(job.error(), HasSubstr("the one before is used"));
    if (file.ends_with(".safetensors")) {
      EXPECT_THAT(job.error(), HasSubstr("is not what was written in 'generators/rank"))
          << "the tensor that ends a shard";
    }
    const Result result_then = result(file);
    EXPECT_EQ(result_then.losses, undisturbed(2).losses);
    EXPECT_TRUE(result_then.weights == undisturbed(2).weights) << "other weights";
  }
}

}  // namespace
}  // namespace lockstep::faults
