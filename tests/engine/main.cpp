// The test program. With --parity or --pipelines it is one rank of a job that runs a table of
// parity.cpp, with --all of one that runs both, with --mistakes that of mistakes.cpp; with --save
// and --finish, and a folder, of one that saves a run or goes on with it.
#include <cstring>

#include <gtest/gtest.h>

#include "parity.h"

int main(int argc, char** argv) {
  using lockstep::ranks::Cells;
  if (argc == 2 && std::strcmp(argv[1], "--parity") == 0)
    return lockstep::ranks::run_cells(lockstep::check_engine_parity);
  if (argc == 2 && std::strcmp(argv[1], "--pipelines") == 0)
    return lockstep::ranks::run_cells(lockstep::check_engine_pipelines);
  if (argc == 2 && std::strcmp(argv[1], "--all") == 0)
    return lockstep::ranks::run_cells([](Cells& cells) {
      lockstep::check_engine_parity(cells);
      lockstep::check_engine_pipelines(cells);
    });
  if (argc == 2 && std::strcmp(argv[1], "--mistakes") == 0)
    return lockstep::ranks::run_cells(lockstep::check_engine_mistakes);
  if (argc == 3 && std::strcmp(argv[1], "--save") == 0)
    return lockstep::ranks::run_cells(
        [&](Cells& cells) { lockstep::save_half_a_run(cells, argv[2]); });
  if (argc == 3 && std::strcmp(argv[1], "--finish") == 0)
    return lockstep::ranks::run_cells(
        [&](Cells& cells) { lockstep::finish_half_a_run(cells, argv[2]); });
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
