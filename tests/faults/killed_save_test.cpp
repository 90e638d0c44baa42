// Row 10: a save is killed at every possible point.
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gmock/gmock.h>

#include <lockstep/base/durable_file.h>
#include <lockstep/checkpoint/format/folder.h>
#include <lockstep/checkpoint/format/piece_file.h>
#include <lockstep/checkpoint/format/reader.h>

#include "disturbed.h"
#include "tests/base/files.h"

namespace lockstep::faults {
namespace {

namespace fs = std::filesystem;
using ::testing::IsEmpty;

// Does the main rank's work in one process: three ranks' files, the manifest, the commit, and the
// removal of the oldest checkpoint.
void save(const fs::path& run, std::int64_t step) {
  checkpoint::CheckpointWriter writer(run, step);
  checkpoint::Manifest manifest;
  manifest.state.step = step;
  for (int rank = 0; rank < 3; ++rank) {
    const std::string contents(5000, static_cast<char>('a' + (step + rank) % 26));
    const auto size = static_cast<std::int64_t>(contents.size());
    const checkpoint::PieceInMemory piece{.tensor = "model/" + std::to_string(rank),
                                          .dtype = checkpoint::DType::u8,
                                          .shape = {size},
                                          .placement = mesh::Placement::full({size}),
                                          .bytes = std::as_bytes(std::span(contents))};
    add(manifest, checkpoint::write_piece_file(writer.path(), checkpoint::piece_file_name(rank),
                                               {&piece, 1}));
  }
  write_durably(writer.path() / checkpoint::kManifestFile, to_text(manifest));
  writer.commit();
  checkpoint::remove_old(run, 2);
}

enum class Traced { killed, ended, not_allowed };

// Saves in a process that is killed when it is about to make its system call number `number`,
// counted from 1.
Traced save_until_call(const fs::path& run, std::int64_t step, int number) {
  const pid_t child = ::fork();
  if (child == 0) {
    if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) ::_exit(2);
    ::raise(SIGSTOP);
    try {
      save(run, step);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "the save failed: %s\n", error.what());
      ::_exit(1);
    }
    ::_exit(0);
  }
  int status = 0;
  if (::waitpid(child, &status, 0) != child || !WIFSTOPPED(status)) return Traced::not_allowed;
  ::ptrace(PTRACE_SETOPTIONS, child, nullptr, PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL);
  // A traced process stops twice at each call: before it and after.
  for (int stop = 1; stop < 2 * number; ++stop) {
    ::ptrace(PTRACE_SYSCALL, child, nullptr, nullptr);
    ::waitpid(child, &status, 0);
    if (!WIFSTOPPED(status)) {
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
      return Traced::ended;
    }
  }
  ::kill(child, SIGKILL);
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  return Traced::killed;
}

// Expects that all listed checkpoints are whole, that the newest is the one before the save or the
// save's own, and that the next save removes everything else. Returns the newest.
std::int64_t expect_newest_is_whole(const fs::path& run, std::int64_t before) {
  const auto all = checkpoint::list_checkpoints(run);
  EXPECT_FALSE(all.empty());
  if (all.empty()) return 0;
  for (const auto& one : all)
    EXPECT_THAT(checkpoint::CheckpointReader(one.path).damages(), IsEmpty()) << one.path;
  EXPECT_TRUE(all.back().step == before || all.back().step == before + 1) << all.back().step;
  return all.back().step;
}

// A folder in memory, where syncing takes no time. What the kernel has been told outlives the
// process.
class FolderInMemory {
 public:
  FolderInMemory() {
    std::string name = "/dev/shm/killed-save-XXXXXX";
    path_ = ::mkdtemp(name.data()) != nullptr ? fs::path(name) : fallback_.path() / "run";
  }
  ~FolderInMemory() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  FolderInMemory(const FolderInMemory&) = delete;
  FolderInMemory& operator=(const FolderInMemory&) = delete;

  fs::path operator/(const std::string& name) const { return path_ / name; }

 private:
  lockstep::testing::TemporaryFolder fallback_;
  fs::path path_;
};

class Row10KilledSave : public DisturbedTraining {
 protected:
  // Saves step 3, where steps 1 and 2 exist, and also step 3 if the save replaces it.
  void kill_at_every_call(bool replaces) {
    constexpr std::int64_t step = 3;
    const FolderInMemory folder;
    const fs::path before = folder / "before", run = folder / "run";
    for (std::int64_t earlier = 1; earlier < (replaces ? step + 1 : step); ++earlier)
      save(before, earlier);
    int killed = 0;
    bool committed = false;
    for (int number = 1;; ++number) {
      fs::copy(before, run, fs::copy_options::recursive);
      const Traced traced = save_until_call(run, step, number);
      if (traced == Traced::not_allowed) GTEST_SKIP() << "this process may not trace another";
      const std::int64_t newest = expect_newest_is_whole(run, step - 1);
      // A step that existed does not disappear, whether or not it is replaced.
      EXPECT_TRUE(!replaces || newest == step) << "at call " << number;
      EXPECT_FALSE(committed && newest != step) << "what was committed is gone, at call " << number;
      committed = newest == step;
      save(run, step + 1);
      for (const auto& entry : fs::directory_iterator(run))
        EXPECT_THAT(entry.path().filename().string(), ::testing::StartsWith("step-"))
            << "left by call " << number;
      fs::remove_all(run);
      if (traced == Traced::ended) break;
      ++killed;
      ASSERT_FALSE(HasFailure()) << "at call " << number;
      ASSERT_LT(number, 5000);
    }
    EXPECT_TRUE(committed);
    EXPECT_GT(killed, 50) << "a save of several files makes more calls than that";
    std::printf("killed before each of %d system calls\n", killed);
  }

  Launched killed_at(const std::string& rank, std::size_t call, const std::string& name) {
    return start(
        {.launcher = {"--max-restarts", "1"},
         .variables = with_shim({"SHIM_IO=KILL", "SHIM_IO_PATH=checkpoints", "SHIM_IO_RANK=" + rank,
                                 "SHIM_IO_CALL=" + std::to_string(call)})},
        name);
  }

  // The system calls that a rank makes on files of its run, in order.
  std::vector<std::string> calls_of(const std::string& rank) {
    const fs::path log = files_.folder() / ("calls-of-" + rank);
    Launched job =
        start({.variables = with_shim({"SHIM_IO=NOTHING", "SHIM_IO_PATH=checkpoints",
                                       "SHIM_IO_RANK=" + rank, "SHIM_IO_LOG=" + log.string()})},
              "counted-" + rank);
    EXPECT_EQ(job.wait(milliseconds(180'000)), 0) << job.error();
    return launch::testing::lines_of(lockstep::testing::read_file(log));
  }

  // Runs a job whose rank is killed at that call of its saves, and is started anew.
  void expect_survives(const std::string& rank, std::size_t call, const std::string& what) {
    SCOPED_TRACE("rank " + rank + " at call " + std::to_string(call) + ": " + what);
    const std::string name = "run-" + rank + "-" + std::to_string(call);
    Launched job = killed_at(rank, call, name);
    EXPECT_EQ(job.wait(milliseconds(180'000)), 0) << job.error();
    expect_nothing_left(job);
    const auto fault = only_fault(job);
    EXPECT_EQ(fault["kind"], "signal") << job.error();
    EXPECT_EQ(fault["rank"], std::stoi(rank));
    EXPECT_EQ(fault["restarted"], true);
    expect_undisturbed_result(2, {}, name);
  }
};

TEST_F(Row10KilledSave, BeforeEverySystemCall) { kill_at_every_call(false); }
TEST_F(Row10KilledSave, BeforeEverySystemCallOfOneThatIsSavedAgain) { kill_at_every_call(true); }

// In a training, whose ranks save together beside the steps, the rank is killed at a few of the
// calls of its second save.
TEST_F(Row10KilledSave, OfARankThatTrains) {
  for (const std::string rank : {"0", "1"}) {
    const auto calls = calls_of(rank);
    ASSERT_GT(calls.size(), 10u);
    const std::size_t call = calls.size() * 2 / 5;
    expect_survives(rank, call, calls[call - 1]);
  }
}

class WholeRow10KilledSave : public Row10KilledSave {};

TEST_F(WholeRow10KilledSave, OfARankThatTrainsAtEveryCall) {
  for (const std::string rank : {"0", "1"}) {
    const auto calls = calls_of(rank);
    ASSERT_GT(calls.size(), 10u);
    for (std::size_t call = 1; call <= calls.size() / 2 && !HasFailure(); ++call)
      expect_survives(rank, call, calls[call - 1]);
    std::printf("rank %s was killed at each of %zu calls\n", rank.c_str(), calls.size() / 2);
  }
}

}  // namespace
}  // namespace lockstep::faults
