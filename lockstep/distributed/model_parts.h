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
#include <lockstep/mesh/placement/placement.h>
#include <lockstep/mesh/tensors.h>
#include <lockstep/nn/tensor_parallel/tensor_axis.h>
#include <lockstep/optim/clip.h>

namespace lockstep {

// One rank's parts of the model, as they are when this is made. The group has the ranks that hold
// the other parts: those of one place in the data. Every rank of it makes one and calls its
// functions.
//
// A parameter that several ranks have, of one name and shape, is one parameter.
//
// Ownership: shares the group. Threading: as the group. Failure: CommError from its calls.
class ModelParts {
 public:
  // The tensors that names stand for.
  enum class Names {
    of_tensors,  // parameters and buffers
    of_state,    // an optimizer's: "exp_avg.<parameter>"
  };
  enum class Values {
    there,
    deferred,  // parameters are without memory yet
  };

  // `group` may be null where every rank has all of every model. UsageError on every rank where two
  // have a parameter of one name whose values differ: stages that were built with the same names,
  // or copies that did not start from the same weights.
  ModelParts(const torch::nn::Module& module, std::shared_ptr<comm::Communicator> group,
             Values values = Values::there);

  bool alone() const { return group_ == nullptr || group_->size() == 1; }

  // The parameters that this rank answers for, and sums over all ranks.
  optim::NormScope norm_scope() const;
  // The largest of all ranks' numbers, in place.
  void take_largest(at::Tensor& number) const;

  // This rank's parts as parts of the whole model's tensors.
  std::vector<mesh::HeldTensor> placed(std::vector<mesh::HeldTensor> mine, Names names) const;

  // From every rank's tensors the whole ones, on the first rank of the group, and nothing on the
  // others.
  std::vector<NamedTensor> join(const std::vector<NamedTensor>& mine, Names names) const;
  // The reverse: this rank's part of what the first rank has for each of `wanted`, whose tensors
  // say what it is to be like. What the first rank does not have, or has in another shape, is in
  // `faults` there, and comes as it was.
  std::vector<NamedTensor> take(const std::vector<NamedTensor>& wanted,
                                const std::vector<NamedTensor>& whole, Names names,
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
  Piece piece_of(const NamedTensor& tensor, Names names) const;
  // The cut of a tensor that has this shape on this rank; nothing where no layer is cut so.
  const nn::CutParameter* cut_of(const std::string& name, Names names, at::IntArrayRef shape) const;
  // The pieces of each rank of the group.
  std::vector<std::vector<Piece>> pieces_of_all(const std::vector<NamedTensor>& mine,
                                                Names names) const;
  void check_same_values(const std::vector<NamedTensor>& parameters,
                         const std::vector<std::vector<Piece>>& of_all) const;

  std::shared_ptr<comm::Communicator> group_;
  std::map<std::string, nn::CutParameter> cut_;  // by name
  std::set<std::string> counted_;                // parameters that this rank answers for
};

}  // namespace lockstep
