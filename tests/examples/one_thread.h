// The environment in which the examples are run here.
#pragma once

#include <string>
#include <vector>

#include "launched.h"

namespace lockstep::examples {

using launch::testing::Launched;

// LibTorch's threads wait by spinning, which takes ten times as long if other processes compute,
// too.
inline const std::vector<std::string> kOneThread = {"OMP_NUM_THREADS=1"};

inline Launched run_ranks(int num_ranks, const std::string& program,
                          const std::vector<std::string>& flags = {}) {
  std::vector<std::string> words = {"--nproc-per-node", std::to_string(num_ranks), program};
  words.insert(words.end(), flags.begin(), flags.end());
  return Launched::run(words, kOneThread);
}

}  // namespace lockstep::examples
