// The test program; with the name of a table it is one rank of a job that runs it, or those of its
// cells that have a text in their names:
//
//   lockstep run --nproc-per-node 4 parity_test --model-parallel 'cp 2 tp 2'
#include <map>
#include <string>

#include <gtest/gtest.h>

#include <lockstep/comm/world.h>

#include "data_parallel.h"
#include "model_parallel.h"
#include "sharded.h"

int main(int argc, char** argv) {
  using namespace lockstep;
  using Table = void (*)(ranks::Cells&);
  const std::map<std::string, Table> tables = {
      {"--data-parallel", parity::check_data_parallel},
      {"--sharded", parity::check_some_sharded},
      {"--sharded-gpu", parity::check_sharded_on_gpu},
      {"--sharded-whole", parity::check_sharded},
      {"--model-parallel", parity::check_some_model_parallel},
      {"--model-parallel-whole", parity::check_model_parallel},
      {"--model-parallel-gpu", parity::check_some_model_parallel_on_gpu},
      {"--model-parallel-gpu-whole", parity::check_model_parallel_on_gpu},
  };
  const std::string first = argc > 1 ? argv[1] : "";
  const std::string second = argc > 2 ? argv[2] : "";
  if (const auto table = tables.find(first); table != tables.end())
    return ranks::run_cells(table->second, second);
  if (first == "--sharded-over" || first == "--few-sharded-over") {
    const Table some =
        first == "--sharded-over" ? parity::check_some_sharded : parity::check_few_sharded;
    return ranks::run_cells(comm::join_world({.backend = second, .timeout = milliseconds(60'000)}),
                            second == "nccl" ? parity::check_sharded_on_gpu : some);
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
