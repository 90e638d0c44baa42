// The ranks that the products of a model's layers are cut over.
#pragma once

#include <cstdint>
#include <map>
#include <memory>

#include <lockstep/comm/communicator.h>

namespace lockstep::nn {

// How activations lie on the ranks of a tensor axis between two layers that are cut.
enum class BetweenLayers : std::uint8_t {
  whole,         // each rank has all of them, and computes norms and dropout of all
  by_positions,  // each rank has a slice of the sequence, dim 1: sequence parallelism
};

// Shared by the layers of a model, whose ranks all run the same layers in the same order.
//
// Ownership: shares the group. Threading: as the group. Failure: as the group's calls.
class TensorAxis {
 public:
  explicit TensorAxis(std::shared_ptr<comm::Communicator> group,
                      BetweenLayers between = BetweenLayers::whole)
      : group_(std::move(group)), between_(between) {}

  const std::shared_ptr<comm::Communicator>& group() const { return group_; }
  int rank() const { return group_->rank(); }
  int size() const { return group_->size(); }
  bool by_positions() const { return between_ == BetweenLayers::by_positions; }

  // The ranks next to this one that hold the same of `num_parts` parts, where there are fewer parts
  // than ranks. The first call for a number splits the group: every rank makes it.
  const std::shared_ptr<comm::Communicator>& holders_of_part(int num_parts);

 private:
  std::shared_ptr<comm::Communicator> group_;
  BetweenLayers between_;
  std::map<int, std::shared_ptr<comm::Communicator>> holders_;
};

}  // namespace lockstep::nn
