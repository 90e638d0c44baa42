// A model whose layers are cut over a tensor axis, or whose stages are on several ranks of a
// pipeline, as one: its names and whole tensors.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/mesh/named_tensor.h>
#include <lockstep/mesh/placement.h>
#include <lockstep/nn/layer_cut.h>
#include <lockstep/optim/clip.h>

namespace lockstep {

// One rank's parts of the model, as they are when it is made, and those that hold the others: the
// ranks of one place in the data. Every rank of the group makes it and calls its functions.
//
// Ownership: shares the group. Threading: as the group. Failure: CommError from its calls.
class ModelParts {
 public:
  // `group` may be null where every rank has all of every model.
  ModelParts(const torch::nn::Module& module, std::shared_ptr<comm::Communicator> group,
             c10::Device device);

  bool alone() const { return group_ == nullptr || group_->size() == 1; }

  // Which parameters this rank answers for, and sums over all of them.
  optim::NormScope norm_scope() const;
  // The largest of all ranks' numbers, in place.
  void take_largest(at::Tensor& number) const;

  // From every rank's tensors, by the names of parameters or "exp_avg.<parameter>", the whole ones
  // on the first rank of the group, and nothing on the others.
  std::vector<NamedTensor> join(const std::vector<NamedTensor>& mine) const;
  // The reverse: this rank's part of what the first rank has for each of `wanted`, whose tensors
  // say what it is to be like. What the first rank does not have, or has in another shape, is in
  // `faults` there, and comes as it was.
  std::vector<NamedTensor> take(const std::vector<NamedTensor>& wanted,
                                const std::vector<NamedTensor>& whole,
                                std::vector<std::string>& faults) const;

 private:
  // A tensor as one rank has it.
  struct Piece {
    std::string name;
    at::ScalarType type = at::kFloat;
    std::vector<std::int64_t> whole_shape;
    mesh::Placement placement;  // in the whole's row-major order

    bool operator==(const Piece&) const = default;
  };

  static std::string to_text(const Piece& piece);
  static Piece parse(const std::string& line);
  Piece piece_of(const NamedTensor& tensor) const;
  // Of each rank of the group.
  std::vector<std::vector<Piece>> pieces_of_all(const std::vector<NamedTensor>& mine) const;

  std::shared_ptr<comm::Communicator> group_;
  c10::Device wire_;                             // where the group's calls want tensors
  std::map<std::string, nn::CutParameter> cut_;  // by name
  std::set<std::string> counted_;                // parameters that this rank answers for
};

}  // namespace lockstep
