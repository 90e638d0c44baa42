// Tensor parallelism for plain torch::nn modules: layers are cut over ranks by a plan of their
// names, and the model's code stays as it is.
//
//   using enum lockstep::tensor::Cut;
//   auto cut = lockstep::tensor::parallelize_module(
//       *model, mesh.axis("tp"), {{"blocks.*.fc1", column}, {"blocks.*.fc2", row}});
//
// The model's forward, the backward of its loss, and an optimizer over model->parameters() then run
// as before, with a part of those weights on each rank.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/mesh/tensors.h>
#include <lockstep/nn/tensor_parallel/tensor_axis.h>

namespace lockstep::tensor {

enum class Cut : std::uint8_t {
  // A Linear is cut along its outputs (rows of the weight, and the bias), an Embedding along its
  // features.
  column,
  // A Linear is cut along its inputs; the bias stays whole and is added once. An Embedding is cut
  // along its tokens.
  row,
  // A MultiheadAttention is cut into its heads: each rank projects to, attends with and projects
  // from its own. The ranks must divide the heads.
  heads,
  // A Linear whose outputs are queries, keys and values, one after the other, is cut along the
  // outputs of each.
  qkv,
};

// For the middle of a sentence: "columns".
const char* name_of(Cut cut);

struct PlannedCut {
  // The names of layers in the model: "*" stands for any run of characters without a dot.
  std::string layers;
  Cut cut;
};

using Plan = std::vector<PlannedCut>;

// Tensors that were put together because an operator needs all of them.
struct Gathered {
  std::string op;      // "aten::layer_norm"
  std::string source;  // the parameter, or the layer whose output it came from: "blocks.0.fc1"
  std::int64_t calls = 0;
  std::int64_t bytes = 0;  // the whole tensors of all calls
};

class SplitOwner;

// A model whose layers were cut: its whole state, and which operators had to gather.
//
// Ownership: shares the model's tensors and the group; the model does not need this to run.
// Threading: as the group. Functions that communicate say so, and every rank calls them.
class ParallelizedModule {
 public:
  // The tensors that were gathered since the beginning or forget_gathers(); empty if everything was
  // computed on parts.
  std::vector<Gathered> gathers() const;
  void forget_gathers();

  // Every parameter that is cut: its name, where its part lies in the whole, and the part itself,
  // an ordinary tensor that shares its memory.
  std::vector<nn::CutParameter> cut_parameters() const;

  // Every distinct parameter and buffer, whole, on the first rank; other ranks get an empty list.
  // They are gathered one after the other. Communicates.
  std::vector<NamedTensor> full_state_dict() const;
  // Loads what full_state_dict() returned on the first rank; other ranks' lists are ignored.
  // UsageError on all ranks naming a tensor that is missing, unknown or has another shape.
  // Communicates.
  void load_full_state_dict(const std::vector<NamedTensor>& state);

 private:
  friend class ModuleCutter;
  ParallelizedModule(std::shared_ptr<SplitOwner> owner, std::vector<NamedTensor> tensors)
      : owner_(std::move(owner)), tensors_(std::move(tensors)) {}

  std::shared_ptr<SplitOwner> owner_;
  std::vector<NamedTensor> tensors_;  // parameters and buffers
};

// Cuts the torch::nn::Linear, Embedding and MultiheadAttention layers that a plan names over the
// ranks of a group. All ranks call it on the same model. Weights and buffers are broadcast from the
// first rank. Parameters stay the same objects and keep their sizes, but have the memory of a part.
//
// Products with these weights, element-wise functions, dropout, attention in heads, softmax,
// cross-entropy, and views between them are computed on parts. Any other operator on a cut tensor
// first gathers it, and the log says so: results are always those of the whole model. Every rank
// must run the same operators in the same order, and, where there is dropout, with generators that
// have the same seed.
//
// Each layer that is cut gets a child module that refuses torch::save() and torch::load().
//
// Failure: UsageError on all ranks, before anything is cut, for a pattern that no layer matches, a
// layer that two patterns cut in different ways, a layer of another type or that is cut already,
// sizes that do not divide, parameters that another module shares, a model that is wrapped already,
// and plans or models that differ between ranks.
ParallelizedModule parallelize_module(torch::nn::Module& module,
                                      std::shared_ptr<comm::Communicator> group, const Plan& plan);

namespace internal {

// Calls a function so that its operators are recorded, and what it makes takes no memory yet.
using Defer = std::function<void(const std::function<void()>&)>;

// As parallelize_module(), for a model that was constructed without memory (lockstep/deferred):
// parts are made within `defer`, and no weight is in memory afterwards that was not before. Nothing
// is broadcast, so every rank must construct the same values.
ParallelizedModule parallelize_deferred(torch::nn::Module& module,
                                        std::shared_ptr<comm::Communicator> group, const Plan& plan,
                                        const Defer& defer);

}  // namespace internal

// Whether a tensor is cut. Parameters, their gradients, an optimizer's state and the output of a
// layer that is cut by columns may be.
bool is_cut(const at::Tensor& tensor);
// The whole tensor, on every rank; all ranks call it. Autograd follows. A tensor that is not cut is
// returned as it is.
at::Tensor full_tensor(const at::Tensor& tensor);
// This rank's part, which shares the tensor's memory. Autograd does not follow. A tensor that is
// not cut is returned as it is.
at::Tensor local_part(const at::Tensor& tensor);

}  // namespace lockstep::tensor
