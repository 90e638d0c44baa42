// The test program. With --rank it is one rank of a job that runs the table of ranks.cpp, with
// --fsdp that of fsdp_ranks.cpp, with --loops and --resharded those of loop_ranks.cpp, with
// --stages that of stages_in_bf16.cpp, with --train a rank of sizes_ranks.cpp.
#include <cstdlib>
#include <cstring>

#include <gtest/gtest.h>

#include "ranks.h"

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "--rank") == 0) {
    const auto dist = lockstep::setup_distributed({.timeout = lockstep::milliseconds(30'000)});
    return lockstep::ranks::run_cells(dist.world(), [&](lockstep::ranks::Cells& cells) {
      check_two_ranks(dist, cells);
      check_resuming(dist, cells);
      lockstep::check_copies_in_memory({.timeout = lockstep::milliseconds(30'000)}, cells);
    });
  }
  if (argc == 2 && std::strcmp(argv[1], "--fsdp") == 0) {
    const auto dist = lockstep::setup_distributed(
        {.mode = lockstep::ParallelMode::FSDP, .timeout = lockstep::milliseconds(30'000)});
    return lockstep::ranks::run_cells(dist.world(), [&](lockstep::ranks::Cells& cells) {
      check_fsdp(dist, cells);
      lockstep::check_copies_in_memory(dist.config(), cells);
    });
  }
  if (argc == 4 && std::strcmp(argv[1], "--train") == 0) {
    const auto dist = lockstep::setup_distributed({.timeout = lockstep::milliseconds(30'000)});
    lockstep::train_to(dist, argv[2], std::atoi(argv[3]));
    return 0;
  }
  if (argc == 3 && std::strcmp(argv[1], "--loops") == 0)
    return lockstep::ranks::run_cells(
        [&](lockstep::ranks::Cells& cells) { lockstep::check_loops(cells, argv[2]); });
  if (argc == 3 && std::strcmp(argv[1], "--resharded") == 0)
    return lockstep::ranks::run_cells(
        [&](lockstep::ranks::Cells& cells) { lockstep::check_resharded(cells, argv[2]); });
  if (argc == 2 && std::strcmp(argv[1], "--stages") == 0)
    return lockstep::ranks::run_cells(lockstep::check_stages_in_bf16);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
