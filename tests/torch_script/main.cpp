// The test program. With --rank and a folder it is one rank of a job that runs the table of
// script_model.cpp, with --exported and a file one that trains that model.
#include <cstring>

#include <gtest/gtest.h>

#include "script_model.h"

int main(int argc, char** argv) {
  using lockstep::ranks::Cells;
  if (argc == 3 && std::strcmp(argv[1], "--rank") == 0)
    return lockstep::ranks::run_cells(
        [&](Cells& cells) { lockstep::check_script_model(argv[2], cells); });
  if (argc == 3 && std::strcmp(argv[1], "--exported") == 0)
    return lockstep::ranks::run_cells(
        [&](Cells& cells) { lockstep::check_exported_model(argv[2], cells); });
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
