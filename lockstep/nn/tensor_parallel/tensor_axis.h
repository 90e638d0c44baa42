// The ranks that the layers of a model are cut over, and how each layer is cut.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/mesh/placement/placement.h>

namespace lockstep::nn {

// How the ranks of a tensor axis hold activations between two layers that are cut.
enum class BetweenLayers : std::uint8_t {
  whole,         // each rank has all of them, and computes all of norms and dropout
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

  // The consecutive ranks, with this one among them, that hold the same one of `num_parts` parts,
  // if there are fewer parts than ranks. The first call with a number splits the group, so every
  // rank makes it.
  const std::shared_ptr<comm::Communicator>& holders_of_part(int num_parts);

 private:
  std::shared_ptr<comm::Communicator> group_;
  BetweenLayers between_;
  std::map<int, std::shared_ptr<comm::Communicator>> holders_;
};

enum class CutKind : std::uint8_t {
  column,      // outputs: each rank computes a part of them from all inputs
  row,         // inputs: each rank computes a partial sum of all outputs from a part of them
  vocabulary,  // rows of an embedding, or of the product with its weight, in parts that may differ
               // by one
};

// Whether each rank has all of a column's output or a row's input, or a part of it.
enum class Features : std::uint8_t { cut, whole };

struct LayerCut {
  CutKind kind = CutKind::column;
  // The outputs of a column layer are this many blocks, one after the other, each of which is cut:
  // 3 if one product gives queries, keys and values.
  std::int64_t blocks = 1;
  // A rank's part of a column layer's block is a multiple of this many outputs, such as a head's.
  // With fewer heads than ranks, consecutive ranks have the same head.
  std::int64_t unit = 1;
  Features features = Features::cut;

  bool operator==(const LayerCut&) const = default;
};

// A parameter that is a part of a larger one.
struct CutParameter {
  std::string name;  // its name in the model
  at::Tensor parameter;
  std::vector<std::int64_t> whole_shape;
  mesh::Placement placement;                  // its place in the whole, in row-major order
  int num_holders = 1;                        // ranks of the axis that hold the same part
  std::vector<std::int64_t> part_shape = {};  // the parameter's, when it was cut
};

// A layer that can be cut. Until it is cut, it is an ordinary layer that computes everything on its
// rank.
//
// Threading: as torch::nn.
class CuttableLayer {
 public:
  virtual ~CuttableLayer() = default;

  // Throws UsageError, with the numbers, if the layer cannot be cut this way, or is cut already.
  // `name` is the layer's name in its model.
  virtual void check_cut(const LayerCut& cut, const TensorAxis& axis,
                         const std::string& name) const = 0;
  // Keeps this rank's part of each parameter and of its gradient; before, all ranks have the same
  // whole parameters. Every rank of the axis calls it. Fails as check_cut() does, and the layer
  // stays whole.
  virtual void cut(const LayerCut& cut, const std::shared_ptr<TensorAxis>& axis,
                   const std::string& name) = 0;
  // The layer's cut parameters, by their names in the layer. Empty before it is cut.
  virtual std::vector<CutParameter> cut_parameters() const = 0;
};

// A child module of a layer that somebody else has cut: it says how the layer's parameters are cut,
// by their names in the layer.
class CutRecord {
 public:
  virtual ~CutRecord() = default;

  virtual std::vector<CutParameter> cut_parameters() const = 0;
};

// The cut parameters of all layers of a model, by their names in the model.
std::vector<CutParameter> cut_parameters(const torch::nn::Module& model);

namespace internal {

// UsageError where a parameter of a layer is no longer the part that the layer was cut to, as after
// set_data() of the whole. `layer` is the layer's name in its model.
void check_part(const at::Tensor& parameter, const CutParameter& cut, const std::string& layer,
                const TensorAxis& axis);
// UsageError for torch::save() and torch::load() of a layer of which each rank has a part: a file
// would have this rank's alone.
void refuse_file(const char* function, const std::string& layer, const TensorAxis& axis);

// Calls body(name, module) for a model, which need not be held by a shared_ptr, and for all modules
// in it.
template <typename Module, typename Body>
void for_each_module(Module& model, const Body& body) {
  body(std::string(), model);
  for (const auto& item : model.named_modules("", /*include_self=*/false))
    body(item.key(), *item.value());
}

// Reduces a parameter, which stays the same object, and its gradient to the part that a placement
// names, in `shape`.
void keep_part(at::Tensor& parameter, const mesh::Placement& placement, at::IntArrayRef shape);

}  // namespace internal

}  // namespace lockstep::nn
