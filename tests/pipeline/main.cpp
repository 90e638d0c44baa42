// The test program; with --data-parallel it is one rank of a job that runs that table.
#include <cstring>

#include <gtest/gtest.h>

#include "data_parallel.h"

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "--data-parallel") == 0)
    return lockstep::ranks::run_cells(lockstep::pipeline::check_data_parallel);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
