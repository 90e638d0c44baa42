// The test program; with --peaks it is one rank of a job that runs the table of peaks.cpp.
#include <cstring>

#include <gtest/gtest.h>

#include "peaks.h"

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "--peaks") == 0)
    return lockstep::ranks::run_cells(lockstep::plan::testing::check_peaks);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
