// The program's frame: verbs, help, and the second program, for verbs that need LibTorch.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include <cli/dispatch.h>

#include "launched.h"

namespace lockstep::launch::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(Dispatch, HelpAndVersion) {
  Launched help({LOCKSTEP_PROGRAM, "--help"});
  EXPECT_EQ(help.wait(), 0);
  EXPECT_THAT(help.output(), HasSubstr("run "));
  Launched version({LOCKSTEP_PROGRAM, "--version"});
  EXPECT_EQ(version.wait(), 0);
  EXPECT_THAT(version.output(), HasSubstr("lockstep 0."));
  Launched run_help({LOCKSTEP_PROGRAM, "run", "--help"});
  EXPECT_EQ(run_help.wait(), 0);
  EXPECT_THAT(run_help.output(), HasSubstr("--nproc-per-node"));
#ifndef __SANITIZE_THREAD__  // whose build leaves the verb out
  Launched train_help({LOCKSTEP_PROGRAM, "train", "--help"});
  EXPECT_EQ(train_help.wait(), 0);
  EXPECT_THAT(train_help.output(), HasSubstr("--set KEY=VALUE  ")) << "one value, not several";
#endif
  Launched nothing({LOCKSTEP_PROGRAM});
  EXPECT_EQ(nothing.wait(), 2);
}

TEST(Dispatch, DoesNotLoadLibTorch) {
  Launched libraries({"ldd", LOCKSTEP_PROGRAM});
  EXPECT_EQ(libraries.wait(), 0);
  EXPECT_THAT(libraries.output(), HasSubstr("libc.so"));
  EXPECT_THAT(libraries.output(), Not(HasSubstr("torch")));
}

TEST(Dispatch, HandsVerbsOfLibTorchToTheSecondProgram) {
  // The second program would be beside this test's own.
  const auto here = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  const auto second = here / "lockstep-torch";
  const cli::Verb verbs[] = {{"check", "looks at the machine", nullptr}};
  std::array<char*, 4> words = {const_cast<char*>("lockstep"), const_cast<char*>("check"),
                                const_cast<char*>("--all"), nullptr};
  if (std::filesystem::exists(second)) GTEST_SKIP() << second << " is already there";
  EXPECT_EXIT(std::exit(cli::dispatch(verbs, 3, words.data())), ::testing::ExitedWithCode(2),
              "'check' needs the program lockstep-torch.*LOCKSTEP_LIBTORCH");
  std::filesystem::create_symlink("/bin/echo", second);
  EXPECT_EXIT(
      {
        ::dup2(2, 1);
        std::exit(cli::dispatch(verbs, 3, words.data()));
      },
      ::testing::ExitedWithCode(0), "check --all");
  std::filesystem::remove(second);
}

}  // namespace
}  // namespace lockstep::launch::testing
