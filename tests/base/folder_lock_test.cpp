#include <lockstep/base/folder_lock.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <optional>
#include <string>
#include <utility>

#include <lockstep/base/durable_file.h>

#include "errors.h"
#include "files.h"

namespace lockstep {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(FolderLock, KeepsASecondOutUntilTheFirstIsGone) {
  const testing::TemporaryFolder folder;
  std::optional<FolderLock> first(folder.path());
  EXPECT_THAT(usage_error([&] { FolderLock second(folder.path()); }),
              AllOf(HasSubstr("another run writes into '" + folder.path().string() + "'"),
                    HasSubstr("a folder of its own")));
  FolderLock moved = std::move(*first);
  first.reset();
  EXPECT_THAT(usage_error([&] { FolderLock second(folder.path()); }), HasSubstr("another run"));
}

TEST(FolderLock, CanBeTakenAgain) {
  const testing::TemporaryFolder folder;
  { FolderLock first(folder.path()); }
  EXPECT_NO_THROW(FolderLock second(folder.path()));
}

TEST(FolderLock, NamesTheProcessAndIsGivenUpByOneThatIsKilled) {
  const testing::TemporaryFolder folder;
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    FolderLock lock(folder.path());
    if (::write(ready[1], "x", 1) != 1) ::_exit(1);
    ::pause();
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  const std::string complaint = usage_error([&] { FolderLock second(folder.path()); });
  EXPECT_THAT(complaint, HasSubstr("another run"));
  if (::access("/proc/locks", R_OK) == 0) {
    EXPECT_THAT(complaint, HasSubstr("(process " + std::to_string(child) + ")"));
  }
  ::kill(child, SIGKILL);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_NO_THROW(FolderLock second(folder.path()));
  ::close(ready[0]);
  ::close(ready[1]);
}

// A process that hangs keeps its locks. The first lock here stands for that process.
TEST(FolderLock, ALaterGenerationOfTheSameJobTakesItOver) {
  const testing::TemporaryFolder folder;
  const FolderLock first(folder.path(), FolderHolder{.job = "a", .generation = 0});
  EXPECT_NO_THROW(first.check());
  const FolderLock second(folder.path(), FolderHolder{.job = "a", .generation = 2});
  EXPECT_NO_THROW(second.check());
  try {
    first.check();
    ADD_FAILURE() << "the first may still write";
  } catch (const CommError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr(folder.path().string()), HasSubstr("generation 2")));
  }
  std::optional<FolderLock> third(std::in_place, folder.path(),
                                  FolderHolder{.job = "a", .generation = 3});
  EXPECT_THROW(second.check(), CommError);
  third.reset();
  EXPECT_THROW(second.check(), CommError) << "also when the later one has ended";
}

TEST(FolderLock, NobodyElseTakesItOver) {
  const testing::TemporaryFolder folder;
  const FolderLock first(folder.path(), FolderHolder{.job = "a", .generation = 1});
  for (const auto& other :
       {FolderHolder{.job = "b", .generation = 2}, FolderHolder{.job = "a", .generation = 1}})
    EXPECT_THAT(usage_error([&] { FolderLock second(folder.path(), other); }),
                HasSubstr("another run"));
  EXPECT_THAT(usage_error([&] { FolderLock second(folder.path()); }), HasSubstr("another run"));
  EXPECT_NO_THROW(first.check());
}

// The process was stopped before it came to the folder, and its job goes on without it.
TEST(FolderLock, AnEarlierGenerationOfTheSameJobIsOver) {
  const testing::TemporaryFolder folder;
  const FolderLock second(folder.path(), FolderHolder{.job = "a", .generation = 1});
  EXPECT_THROW(FolderLock(folder.path(), FolderHolder{.job = "a", .generation = 0}), CommError);
  EXPECT_NO_THROW(second.check());
}

// A process that takes the folder and is stopped just before it writes its claim there.
class StoppedOnItsWay {
 public:
  enum Ending { took_it = 0, found_it_taken = 1, failed = 2 };

  StoppedOnItsWay(const testing::TemporaryFolder& folder, const FolderHolder& holder)
      : process_(::fork()) {
    if (process_ == 0) take(folder.path(), holder);
    int status = 0;
    if (::waitpid(process_, &status, 0) != process_ || !WIFSTOPPED(status)) return;
    traced_ = true;
    ::ptrace(PTRACE_SETOPTIONS, process_, nullptr, PTRACE_O_EXITKILL);
    const auto note = folder / (".holder-" + std::to_string(process_));
    while (!std::filesystem::exists(note) && WIFSTOPPED(status)) {
      ::ptrace(PTRACE_SYSCALL, process_, nullptr, nullptr);
      ::waitpid(process_, &status, 0);
    }
  }

  // False if this process may not trace another.
  bool traced() const { return traced_; }

  // Lets it go on and returns how it ended.
  int ending() const {
    int status = 0;
    ::ptrace(PTRACE_DETACH, process_, nullptr, nullptr);
    ::waitpid(process_, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  [[noreturn]] static void take(const std::filesystem::path& folder, const FolderHolder& holder) {
    if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) ::_exit(failed);
    ::raise(SIGSTOP);
    try {
      const FolderLock lock(folder, holder);
      ::_exit(took_it);
    } catch (const CommError&) {
      ::_exit(found_it_taken);
    } catch (...) {
      ::_exit(failed);
    }
  }

  pid_t process_;
  bool traced_ = false;
};

TEST(FolderLock, OneThatWasStoppedOnItsWayDoesNotTakeItBack) {
  const testing::TemporaryFolder folder;
  const FolderLock hangs(folder.path(), FolderHolder{.job = "a", .generation = 0});
  const StoppedOnItsWay second(folder, FolderHolder{.job = "a", .generation = 1});
  if (!second.traced()) GTEST_SKIP() << "this process may not trace another";
  std::optional<FolderLock> third(std::in_place, folder.path(),
                                  FolderHolder{.job = "a", .generation = 2});
  EXPECT_EQ(second.ending(), StoppedOnItsWay::found_it_taken);
  EXPECT_NO_THROW(third->check());
  third.reset();
  EXPECT_EQ(testing::read_file(folder / ".holder"), "generation 2 of job a\n");
  for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
    EXPECT_EQ(entry.path().filename(), ".holder") << "nothing else is left there";
}

// The later generation gets the folder, even if the earlier one came there in the meantime.
TEST(FolderLock, OneThatWasStoppedOnItsWayTakesItFromAnEarlierOne) {
  const testing::TemporaryFolder folder;
  const FolderLock hangs(folder.path(), FolderHolder{.job = "a", .generation = 0});
  const StoppedOnItsWay third(folder, FolderHolder{.job = "a", .generation = 2});
  if (!third.traced()) GTEST_SKIP() << "this process may not trace another";
  const FolderLock second(folder.path(), FolderHolder{.job = "a", .generation = 1});
  EXPECT_EQ(third.ending(), StoppedOnItsWay::took_it);
  EXPECT_THROW(second.check(), CommError);
}

TEST(FolderLock, OneThatIsNoJobIsNotTakenOver) {
  const testing::TemporaryFolder folder;
  { const FolderLock before(folder.path(), FolderHolder{.job = "a", .generation = 0}); }
  const FolderLock plain(folder.path());
  EXPECT_THAT(usage_error([&] {
                FolderLock second(folder.path(), FolderHolder{.job = "a", .generation = 1});
              }),
              HasSubstr("another run"));
  EXPECT_NO_THROW(plain.check());
}

// The folder's own lock belonged to the first process, and is free when that is killed.
TEST(FolderLock, WhatWasTakenOverIsKeptFromOthersWhenTheFirstIsGone) {
  const testing::TemporaryFolder folder;
  std::optional<FolderLock> first(std::in_place, folder.path(),
                                  FolderHolder{.job = "a", .generation = 0});
  const FolderLock second(folder.path(), FolderHolder{.job = "a", .generation = 1});
  first.reset();
  EXPECT_THAT(usage_error([&] { FolderLock other(folder.path()); }), HasSubstr("another run"));
  EXPECT_THAT(usage_error([&] {
                FolderLock other(folder.path(), FolderHolder{.job = "b", .generation = 2});
              }),
              HasSubstr("another run"));
  EXPECT_NO_THROW(second.check());
}

TEST(FolderLock, AJobOfTheSameNameStartsAnewWhereTheOneBeforeHasEnded) {
  const testing::TemporaryFolder folder;
  { const FolderLock before(folder.path(), FolderHolder{.job = "a", .generation = 3}); }
  const FolderLock anew(folder.path(), FolderHolder{.job = "a", .generation = 0});
  EXPECT_NO_THROW(anew.check());
}

TEST(FolderLock, NeedsAFolder) {
  const testing::TemporaryFolder folder;
  testing::write_file(folder / "file", "");
  EXPECT_THROW(FolderLock(folder / "none"), FileError);
  EXPECT_THROW(FolderLock(folder / "file"), FileError);
}

}  // namespace
}  // namespace lockstep
