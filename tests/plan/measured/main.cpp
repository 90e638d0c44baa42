// The test program. With --peaks or --peaks-gpu it is one rank of a job that runs a table of
// peaks.cpp.
#include <cstring>

#include <gtest/gtest.h>

#include "peaks.h"

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "--peaks") == 0)
    return lockstep::ranks::run_cells(lockstep::plan::testing::check_peaks);
  if (argc == 2 && std::strcmp(argv[1], "--peaks-gpu") == 0)
    return lockstep::ranks::run_cells(lockstep::plan::testing::check_peaks_on_gpu);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
