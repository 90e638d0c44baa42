// Whether models, or optimizers, are in the same state on all ranks.
#pragma once

#include <map>
#include <string>
#include <vector>

#include <lockstep/distributed/distributed.h>

#include <tests/ranks/cells.h>

namespace lockstep {

inline constexpr StateDictOptions kEveryRank{.rank0_only = false};

// By name: strategies may list what they have in another order.
inline void expect_same_state(ranks::Cells& cells, const std::vector<NamedTensor>& got,
                              const std::vector<NamedTensor>& wanted) {
  std::map<std::string, at::Tensor> left;
  for (const NamedTensor& tensor : wanted) left.emplace(tensor.name, tensor.tensor);
  for (const NamedTensor& tensor : got) {
    const auto found = left.find(tensor.name);
    cells.expect(found != left.end(), tensor.name + " is too many");
    if (found == left.end()) continue;
    cells.expect_same(tensor.tensor, found->second, tensor.name);
    left.erase(found);
  }
  for (const auto& [name, tensor] : left) cells.expect(false, name + " is missing");
}

}  // namespace lockstep
