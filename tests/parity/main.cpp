// The test program; with the name of a table it is one rank of a job that runs it.
#include <cstring>

#include <gtest/gtest.h>

#include <lockstep/comm/world.h>

#include "data_parallel.h"
#include "model_parallel.h"
#include "sharded.h"

int main(int argc, char** argv) {
  namespace parity = lockstep::parity;
  if (argc == 2 && std::strcmp(argv[1], "--data-parallel") == 0)
    return lockstep::ranks::run_cells(parity::check_data_parallel);
  if (argc == 2 && std::strcmp(argv[1], "--sharded") == 0)
    return lockstep::ranks::run_cells(parity::check_some_sharded);
  if (argc == 3 && std::strcmp(argv[1], "--sharded-over") == 0)
    return lockstep::ranks::run_cells(
        lockstep::comm::join_world({.backend = argv[2], .timeout = lockstep::milliseconds(60'000)}),
        std::strcmp(argv[2], "nccl") == 0 ? parity::check_sharded_on_gpu
                                          : parity::check_some_sharded);
  if (argc == 2 && std::strcmp(argv[1], "--sharded-gpu") == 0)
    return lockstep::ranks::run_cells(parity::check_sharded_on_gpu);
  if (argc == 2 && std::strcmp(argv[1], "--sharded-whole") == 0)
    return lockstep::ranks::run_cells(parity::check_sharded);
  if (argc == 2 && std::strcmp(argv[1], "--model-parallel") == 0)
    return lockstep::ranks::run_cells(parity::check_some_model_parallel);
  if (argc == 2 && std::strcmp(argv[1], "--model-parallel-whole") == 0)
    return lockstep::ranks::run_cells(parity::check_model_parallel);
  if (argc == 2 && std::strcmp(argv[1], "--model-parallel-gpu") == 0)
    return lockstep::ranks::run_cells(parity::check_model_parallel_on_gpu);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
