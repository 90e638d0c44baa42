// The layout never changes the answer: every strategy against one process, on models nobody tuned
// it for. Each test launches one job of real processes, whose ranks run all cells.
#include <filesystem>

#include <gtest/gtest.h>

#include "../elastic/launched.h"

namespace lockstep::parity {
namespace {

using elastic::testing::Launched;

class Parity : public ::testing::TestWithParam<int> {};

TEST_P(Parity, EqualsOneProcess) {
  const int ranks = GetParam();
  const std::string program = std::filesystem::read_symlink("/proc/self/exe").string();
  Launched job =
      Launched::run({"--standalone", "--nproc-per-node", std::to_string(ranks), program, "--rank"});
  const int code = job.wait(milliseconds(200'000));
  std::string failures;
  int finished = 0;
  for (const std::string& line : elastic::testing::lines_of(job.output())) {
    if (line.find("FAIL [") != std::string::npos) failures += line + "\n";
    if (line.ends_with(" cells, 0 failures")) ++finished;
  }
  EXPECT_EQ(failures, "");
  EXPECT_EQ(code, 0) << job.error();
  EXPECT_EQ(finished, ranks) << job.output();
}

INSTANTIATE_TEST_SUITE_P(Ranks, Parity, ::testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param); });

}  // namespace
}  // namespace lockstep::parity
