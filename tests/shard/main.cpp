// The test program; with the name of a table it is one rank of a job that runs it.
#include <map>
#include <string>

#include <gtest/gtest.h>

#include "tables.h"

namespace lockstep::shard {

namespace {

void check_behaviour(ranks::Cells& cells) {
  check_gradient_norm(cells);
  check_any_module(cells);
  check_any_program(cells);
  check_accumulation(cells);
  check_mistakes(cells);
  check_state(cells);
  check_gathers(cells);
}

const std::map<std::string, void (*)(ranks::Cells&)> kTables = {
    {"--behaviour", check_behaviour},
    {"--memory", check_memory},
    {"--optimizers", check_every_optimizer},
    {"--precision", check_precision},
    {"--gpu", check_gpu},
    {"--zero-plus-plus", check_zero_plus_plus},
    {"--one-rank-more", check_one_rank_more},
    {"--other-units", check_other_units},
    {"--other-call", check_other_call},
    {"--other-pass", check_other_pass},
};

}  // namespace

}  // namespace lockstep::shard

int main(int argc, char** argv) {
  namespace shard = lockstep::shard;
  if (argc == 2)
    if (const auto table = shard::kTables.find(argv[1]); table != shard::kTables.end())
      return lockstep::ranks::run_cells(table->second);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
