// The test program. With --rank it is one rank of a job that runs the table of ranks.cpp, with
// --key one that finds LibTorch's dispatch key taken.
#include <cstring>

#include <gtest/gtest.h>

#include "ranks.h"

int main(int argc, char** argv) {
  namespace replicate = lockstep::replicate;
  if (argc == 2 && std::strcmp(argv[1], "--rank") == 0)
    return lockstep::ranks::run_cells(replicate::check_batch_norms);
  if (argc == 2 && std::strcmp(argv[1], "--key") == 0)
    return lockstep::ranks::run_cells(replicate::check_key);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
