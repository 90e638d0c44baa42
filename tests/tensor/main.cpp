// The test program; with the name of a table it is one rank of a job that runs it.
#include <map>
#include <string>

#include <gtest/gtest.h>

#include "tables.h"

namespace lockstep::nn {

namespace {

void check_all(ranks::Cells& cells) {
  check_column_layers(cells);
  check_row_layers(cells);
  check_vocabulary_layers(cells);
  check_vocabulary_loss(cells);
  check_slices_of_positions(cells);
  check_modules_of_users(cells);
  check_deferred_models(cells);
  check_traffic(cells);
  check_tensor_mistakes(cells);
  check_ranks_that_disagree(cells);
}

void check_plain(ranks::Cells& cells) {
  tensor::check_plain_modules(cells);
  tensor::check_plain_attention(cells);
  tensor::check_plain_losses(cells);
  tensor::check_plain_plans(cells);
  tensor::check_plain_gathers(cells);
  tensor::check_plain_operators(cells);
  tensor::check_plain_graph(cells);
  tensor::check_plain_training(cells);
  tensor::check_plain_state(cells);
  tensor::check_plain_mistakes(cells);
}

const std::map<std::string, void (*)(ranks::Cells&)> kTables = {{"--all", check_all},
                                                                {"--plain", check_plain}};

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
