// The test program; with --rank it is one rank of a job that runs the whole table.
#include <cstdio>
#include <cstring>

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <lockstep/comm/world.h>

#include "suite.h"

namespace lockstep::parity {

namespace {

int run_rank() {
  at::set_num_threads(1);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  Suite suite(comm::join_world({.timeout = milliseconds(60'000)}));
  try {
    check_data_parallel(suite);
  } catch (const std::exception& error) {
    std::printf("FAIL [%s] threw %s\n", suite.current().c_str(), error.what());
    return 1;
  }
  std::printf("%d cells, %d failures\n", suite.num_cells(), suite.num_failures());
  return suite.num_failures() == 0 ? 0 : 1;
}

}  // namespace

}  // namespace lockstep::parity

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "--rank") == 0) return lockstep::parity::run_rank();
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
