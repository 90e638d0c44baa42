// The test program. With the name of a table it is one rank of a job that runs it.
#include <map>
#include <string>

#include <gtest/gtest.h>

#include "tables.h"

namespace lockstep::nn {

namespace {

void check_all(ranks::Cells& cells) {
  check_parity(cells);
  check_module(cells);
  check_context_mistakes(cells);
}

const std::map<std::string, void (*)(ranks::Cells&)> kTables = {
    {"--all", check_all}, {"--memory", check_context_memory}, {"--gpu", check_context_gpu}};

}  // namespace

}  // namespace lockstep::nn

int main(int argc, char** argv) {
  namespace nn = lockstep::nn;
  if (argc == 2)
    if (const auto table = nn::kTables.find(argv[1]); table != nn::kTables.end())
      return lockstep::ranks::run_cells(table->second);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
