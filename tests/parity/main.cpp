// The test program. With the name of a table it is one rank of a job that runs the table; with a
// text after that, it runs only the cells that have the text in their names. The backend and the
// tensors' device may come first:
//
//   lockstep run --nproc-per-node 4 parity_test --model-parallel 'cp 2 tp 2'
//   lockstep run --nproc-per-node 2 parity_test --over nccl cuda --model-parallel-gpu
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/comm/world/join.h>

#include <tests/ranks/gpu_sharing.h>

#include "data_parallel.h"
#include "model_parallel.h"
#include "sharded.h"

int main(int argc, char** argv) {
  using namespace lockstep;
  using Table = void (*)(ranks::Cells&);
  const std::map<std::string, Table> tables = {
      {"--data-parallel", parity::check_data_parallel},
      {"--sharded", parity::check_some_sharded},
      {"--sharded-few", parity::check_few_sharded},
      {"--sharded-gpu", parity::check_sharded_on_gpu},
      {"--sharded-whole", parity::check_sharded},
      {"--model-parallel", parity::check_some_model_parallel},
      {"--model-parallel-whole", parity::check_model_parallel},
      {"--model-parallel-gpu", parity::check_some_model_parallel_on_gpu},
      {"--model-parallel-gpu-whole", parity::check_model_parallel_on_gpu},
  };
  std::vector<std::string> words(argv + 1, argv + argc);
  comm::JoinOptions join{.timeout = milliseconds(60'000)};
  if (words.size() > 3 && words[0] == "--over") {
    join.backend = words[1];
    join.device = c10::Device(words[2]);
    if (join.backend == "nccl") ranks::be_a_host_for_nccl();
    words.erase(words.begin(), words.begin() + 3);
  } else if (!words.empty() && words[0].find("-gpu") != std::string::npos) {
    ranks::share_the_gpu_at_once("4");
  }
  if (!words.empty())
    if (const auto table = tables.find(words[0]); table != tables.end())
      return ranks::run_cells(comm::join_world(join), table->second,
                              words.size() > 1 ? words[1] : "");
  testing::InitGoogleTest(&argc, argv);
  if (argc > 1) {
    std::fprintf(stderr, "there is no table called %s\n", argv[1]);
    return 2;
  }
  return RUN_ALL_TESTS();
}
