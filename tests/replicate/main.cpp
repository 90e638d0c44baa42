// The test program. With --rank it is one rank of a job that runs the table of behaviour.cpp, with
// --unused one whose ranks use different parameters, which is refused.
#include <cstring>

#include <gtest/gtest.h>

#include "behaviour.h"

int main(int argc, char** argv) {
  namespace replicate = lockstep::replicate;
  if (argc == 2 && std::strcmp(argv[1], "--rank") == 0)
    return lockstep::ranks::run_cells(replicate::check_behaviour);
  if (argc == 2 && std::strcmp(argv[1], "--unused") == 0)
    return lockstep::ranks::run_cells(replicate::check_refusal);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
