// The test program; with --rank it is one rank of a job that runs the whole table.
#include <cstring>

#include <gtest/gtest.h>

#include "data_parallel.h"

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "--rank") == 0)
    return lockstep::ranks::run_cells(lockstep::parity::check_data_parallel);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
