// The test program. With the name of a table it is one rank of a job that runs it, over the backend
// that may follow the name.
#include <map>
#include <string>

#include <gtest/gtest.h>

#include <lockstep/comm/world/join.h>

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
    {"--data-parallel", check_data_parallel},
    {"--schedules", check_schedules},
    {"--behaviour", check_behaviour},
    {"--pipes", check_pipes},
    {"--documented", check_documented},
    {"--one-host", check_clocks_of_one_host},
    {"--listed", check_listed},
    {"--several-hosts", check_clocks_of_several_hosts},
};

}  // namespace

}  // namespace lockstep::pipeline

int main(int argc, char** argv) {
  namespace pipeline = lockstep::pipeline;
  if (argc == 2 || argc == 3)
    if (const auto table = pipeline::kTables.find(argv[1]); table != pipeline::kTables.end())
      return lockstep::ranks::run_cells(
          lockstep::comm::join_world(
              {.backend = argc == 3 ? argv[2] : "auto", .timeout = lockstep::milliseconds(60'000)}),
          table->second);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
