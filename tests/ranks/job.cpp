#include "job.h"

#include <filesystem>

#include <gtest/gtest.h>

#include "../launch/launched.h"

namespace lockstep::ranks {

using launch::testing::Launched;

// Read when the program starts: in a chroot the answer changes once a test has entered a mount
// namespace of its own.
const std::filesystem::path kThisProgram = std::filesystem::read_symlink("/proc/self/exe");

void expect_cells_pass(int num_ranks, const std::vector<std::string>& arguments,
                       milliseconds longest) {
  std::vector<std::string> words = {"--standalone", "--nproc-per-node", std::to_string(num_ranks),
                                    kThisProgram.string()};
  words.insert(words.end(), arguments.begin(), arguments.end());
  Launched job = Launched::run(words);
  const int code = job.wait(longest);
  std::string failures;
  int finished = 0;
  for (const std::string& line : launch::testing::lines_of(job.output())) {
    if (line.find("FAIL [") != std::string::npos) failures += line + "\n";
    if (line.ends_with(" cells, 0 failures")) ++finished;
  }
  EXPECT_EQ(failures, "");
  EXPECT_EQ(code, 0) << job.error();
  EXPECT_EQ(finished, num_ranks) << job.output();
}

}  // namespace lockstep::ranks
