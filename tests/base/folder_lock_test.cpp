#include <lockstep/base/folder_lock.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <optional>
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

// A process that hangs keeps its locks. Here the first one is that.
TEST(FolderLock, ALaterGenerationOfTheSameJobTakesItOver) {
  const testing::TemporaryFolder folder;
  const FolderLock first(folder.path(), FolderHolder{.job = "a", .generation = 0});
  EXPECT_NO_THROW(first.check());
  const FolderLock second(folder.path(), FolderHolder{.job = "a", .generation = 2});
  EXPECT_NO_THROW(second.check());
  try {
    first.check();
    ADD_FAILURE() << "the first may still write";
  } catch (const FileError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr(folder.path().string()), HasSubstr("generation 2")));
  }
  std::optional<FolderLock> third(std::in_place, folder.path(),
                                  FolderHolder{.job = "a", .generation = 3});
  EXPECT_THROW(second.check(), FileError);
  third.reset();
  EXPECT_THROW(second.check(), FileError) << "also when the later one has ended";
}

TEST(FolderLock, NobodyElseTakesItOver) {
  const testing::TemporaryFolder folder;
  const FolderLock first(folder.path(), FolderHolder{.job = "a", .generation = 1});
  for (const auto& other :
       {FolderHolder{.job = "b", .generation = 2}, FolderHolder{.job = "a", .generation = 1},
        FolderHolder{.job = "a", .generation = 0}})
    EXPECT_THAT(usage_error([&] { FolderLock second(folder.path(), other); }),
                HasSubstr("another run"));
  EXPECT_THAT(usage_error([&] { FolderLock second(folder.path()); }), HasSubstr("another run"));
  EXPECT_NO_THROW(first.check());
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

// The folder's own lock was the first one's, and is free when that is killed.
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
