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

enum class CutKind : std::uint8_t {
  column,      // outputs: each rank computes a part of them from all inputs
  row,         // inputs: each rank computes a partial sum of all outputs from a part of them
  vocabulary,  // rows of an embedding, or of the product with its weight, in parts that may differ
               // by one
};

// A column's output on each rank, and a row's input.
enum class Features : std::uint8_t { cut, whole };

struct LayerCut {
  CutKind kind = CutKind::column;
  // The outputs of a column are so many blocks, one after the other, of which each is cut: 3 where
  // one product gives queries, keys and values.
  std::int64_t blocks = 1;
  // A part of a column's block is a multiple of so many outputs, a head's. With fewer heads than
  // ranks, ranks that are next to each other have the same one.
  std::int64_t unit = 1;
  Features features = Features::cut;

  bool operator==(const LayerCut&) const = default;
};

// A parameter that is a part of a larger one.
struct CutParameter {
  std::string name;  // in the model
  at::Tensor parameter;
  std::vector<std::int64_t> whole_shape;
  mesh::Placement placement;  // in the whole; of its row-major order (mesh/tensor_part.h)
  int num_holders = 1;        // ranks of the axis that have the same part
};

// A layer that can be cut. Before that it is an ordinary one: all of its computation is here.
//
// Threading: as torch::nn.
class CuttableLayer {
 public:
  virtual ~CuttableLayer() = default;

  // UsageError, with the numbers, where it cannot be cut so, or is cut already. `name` is the
  // layer's in its model.
  virtual void check_cut(const LayerCut& cut, const TensorAxis& axis,
                         const std::string& name) const = 0;
  // Keeps of each parameter, which all ranks have whole and alike, and of its gradient, this rank's
  // part. Every rank of the axis calls it. Fails as check_cut() does, and the layer stays whole.
  virtual void cut(const LayerCut& cut, const std::shared_ptr<TensorAxis>& axis,
                   const std::string& name) = 0;
  // Its own parameters, by their own names. None before it is cut.
  virtual std::vector<CutParameter> cut_parameters() const = 0;
};

// The cut parameters of all layers of a model, by their names there.
std::vector<CutParameter> cut_parameters(const torch::nn::Module& model);

// UsageError that names a parameter of the model whose gradients somebody waits for, as DDP and
// every kind of sharding do once a model is wrapped: other memory behind it would leave them
// without. `function` is what the user has called.
void refuse_wrapped(const torch::nn::Module& model, const std::string& function);

namespace internal {

// body(name, module) of a model, which need not lie in a shared_ptr, and of all modules in it.
template <typename Module, typename Body>
void for_each_module(Module& model, const Body& body) {
  body(std::string(), model);
  for (const auto& item : model.named_modules("", /*include_self=*/false))
    body(item.key(), *item.value());
}

// Makes a parameter, which stays the same object, the part of it that a placement names, in
// `shape`; and so its gradient.
void keep_part(at::Tensor& parameter, const mesh::Placement& placement, at::IntArrayRef shape);

}  // namespace internal

}  // namespace lockstep::nn
