#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <random>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/base/durable_file.h>
#include <lockstep/checkpoint/format/folder.h>
#include <lockstep/checkpoint/format/piece_file.h>
#include <lockstep/checkpoint/format/reader.h>

#include "../base/files.h"

namespace lockstep::checkpoint {
namespace {

namespace fs = std::filesystem;

std::string contents_of(std::int64_t step, int file) {
  return std::string(20'000, static_cast<char>('a' + (step + file) % 26)) + std::to_string(step);
}

void write_checkpoint(const fs::path& run, std::int64_t step) {
  CheckpointWriter writer(run, step);
  Manifest manifest;
  manifest.state.step = step;
  for (int rank = 0; rank < 3; ++rank) {
    const std::string contents = contents_of(step, rank);
    const auto size = static_cast<std::int64_t>(contents.size());
    const PieceInMemory piece{.tensor = "model/" + std::to_string(rank),
                              .dtype = DType::u8,
                              .shape = {size},
                              .placement = mesh::Placement::full({size}),
                              .bytes = std::as_bytes(std::span(contents))};
    add(manifest, write_piece_file(writer.path(), piece_file_name(rank), {&piece, 1}));
  }
  write_durably(writer.path() / kManifestFile, to_text(manifest));
  writer.commit();
}

// Writes checkpoints, beginning after the newest, each twice; reports each commit, and keeps two.
// Goes on until it is killed.
[[noreturn]] void write_for_ever(const fs::path& run, int commits) {
  const auto newest = newest_checkpoint(run);
  for (std::int64_t step = newest ? newest->step : 1;; ++step)
    for (int time = 0; time < 2; ++time) {
      write_checkpoint(run, step);
      if (::write(commits, &step, sizeof step) != sizeof step) ::_exit(1);
      remove_old(run, 2);
    }
}

// The time that one checkpoint takes here, which may be a millisecond or a hundred.
std::chrono::microseconds time_of_one(const fs::path& run) {
  const auto start = std::chrono::steady_clock::now();
  write_checkpoint(run, 1);
  return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() -
                                                               start);
}

// Expects that every listed checkpoint is whole, and that the newest is at least the last one
// committed.
void check_all(const fs::path& run, std::int64_t last_committed) {
  const auto all = list_checkpoints(run);
  ASSERT_EQ(last_committed > 0, !all.empty());
  for (const Checkpoint& checkpoint : all) {
    CheckpointReader reader(checkpoint.path);
    EXPECT_EQ(reader.manifest().state.step, checkpoint.step);
    EXPECT_EQ(reader.manifest().files.size(), 3u);
    EXPECT_THAT(reader.damages(), ::testing::IsEmpty());
    std::string contents(contents_of(checkpoint.step, 2).size(), ' ');
    reader.read("model/2", mesh::Placement::full({static_cast<std::int64_t>(contents.size())}),
                std::as_writable_bytes(std::span(contents)));
    EXPECT_EQ(contents, contents_of(checkpoint.step, 2));
  }
  EXPECT_GE(all.empty() ? 0 : all.back().step, last_committed);
}

TEST(KilledWriter, LeavesTheNewestCompleteCheckpointAtAnyMoment) {
  const testing::TemporaryFolder folder;
  const fs::path run = folder / "run";
  std::mt19937 random(7);
  std::int64_t last_committed = 0;
  int commits = 0;
  const auto longest =
      3 * std::min(time_of_one(folder / "trial"), std::chrono::microseconds(60'000));
  // On a busy machine there are more rounds, until one writer lived long enough to commit.
  for (int round = 0; round < 40 || (commits == 0 && round < 400); ++round) {
    int ends[2];
    ASSERT_EQ(::pipe(ends), 0);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      try {
        write_for_ever(run, ends[1]);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "the writer failed: %s\n", error.what());
      }
      ::_exit(1);
    }
    ::close(ends[1]);
    std::this_thread::sleep_for(longest * (random() % 1000) / 1000);
    ::kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFSIGNALED(status)) << "the writer ended by itself";
    for (std::int64_t step = 0; ::read(ends[0], &step, sizeof step) == sizeof step; ++commits)
      last_committed = std::max(last_committed, step);
    ::close(ends[0]);
    check_all(run, last_committed);
    if (newest_checkpoint(run)) last_committed = newest_checkpoint(run)->step;
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(commits, 0) << "every writer was killed before its first commit";
  // The next writer that lives removes everything that the killed ones left.
  { const CheckpointWriter next(run, 0); }
  for (const auto& entry : fs::directory_iterator(run))
    EXPECT_EQ(entry.path().filename().string().front(), 's') << entry.path();
}

}  // namespace
}  // namespace lockstep::checkpoint
