// How a layer is cut over the ranks of a tensor axis.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/mesh/placement/placement.h>
#include <lockstep/nn/tensor_axis.h>

namespace lockstep::nn {

enum class CutKind : std::uint8_t {
  column,      // outputs: each rank computes a part of them from all inputs
  row,         // inputs: each rank computes a partial sum of all outputs from a part of them
  vocabulary,  // rows of an embedding, or of the product with its weight, in parts that may differ
               // by one
};

// What a column's output is on each rank, and a row's input.
enum class Features : std::uint8_t { cut, whole };

struct LayerCut {
  CutKind kind = CutKind::column;
  // Of a column: its outputs are so many blocks, one after the other, of which each is cut: 3 where
  // one product gives queries, keys and values.
  std::int64_t blocks = 1;
  // Of a column: a part of a block is a multiple of so many outputs, a head's. With fewer of them
  // than ranks, ranks that are next to each other have the same one.
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

// Of all layers of a model, by their names there.
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
