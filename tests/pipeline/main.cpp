// The test program; with the name of a table it is one rank of a job that runs it.
#include <map>
#include <string>

#include <gtest/gtest.h>

#include "data_parallel.h"
#include "executor.h"

namespace lockstep::pipeline {

namespace {

void check_behaviour(ranks::Cells& cells) {
  check_steps(cells);
  check_failures(cells);
  check_mistakes(cells);
  check_cut_layers(cells);
}

const std::map<std::string, void (*)(ranks::Cells&)> kTables = {
    {"--data-parallel", check_data_parallel}, {"--schedules", check_schedules},
    {"--behaviour", check_behaviour},         {"--pipes", check_pipes},
    {"--documented", check_documented},
};

}  // namespace

}  // namespace lockstep::pipeline

int main(int argc, char** argv) {
  namespace pipeline = lockstep::pipeline;
  if (argc == 2)
    if (const auto table = pipeline::kTables.find(argv[1]); table != pipeline::kTables.end())
      return lockstep::ranks::run_cells(table->second);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
