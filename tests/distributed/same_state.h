// Whether two models, or optimizers, are in the same state.
#pragma once

#include <algorithm>
#include <vector>

#include <spdlog/fmt/fmt.h>

#include <lockstep/distributed/distributed.h>

#include <tests/ranks/cells.h>

namespace lockstep {

inline constexpr StateDictOptions kEveryRank{.rank0_only = false};

inline void expect_same_state(ranks::Cells& cells, const std::vector<NamedTensor>& got,
                              const std::vector<NamedTensor>& wanted) {
  cells.expect(got.size() == wanted.size(),
               fmt::format("{} tensors, {} were expected", got.size(), wanted.size()));
  for (std::size_t i = 0; i < std::min(got.size(), wanted.size()); ++i) {
    cells.expect(got[i].name == wanted[i].name,
                 fmt::format("{} is where {} was expected", got[i].name, wanted[i].name));
    cells.expect_same(got[i].tensor, wanted[i].tensor, got[i].name);
  }
}

}  // namespace lockstep
