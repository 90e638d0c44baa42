// Tensor parallelism for modules that are not to be touched: plain torch::nn layers, cut by a plan
// of their names.
//
//   using enum lockstep::tensor::Cut;
//   auto cut = lockstep::tensor::parallelize_module(
//       *model, mesh.axis("tp"), {{"blocks.*.fc1", column}, {"blocks.*.fc2", row}});
//
// The model's own forward, the backward of its loss, and an optimizer over model->parameters() then
// run as they did, with a part of those weights on each rank.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/mesh/tensors.h>
#include <lockstep/nn/tensor_parallel/tensor_axis.h>
#include <lockstep/parallel/tensor/gather_log.h>

namespace lockstep::tensor {

enum class Cut : std::uint8_t {
  // Of a Linear: its outputs, that is rows of the weight and the bias. Of an Embedding: its
  // features.
  column,
  // Of a Linear: its inputs; the bias stays whole and is added once. Of an Embedding: its tokens.
  row,
};

struct PlannedCut {
  // The names of layers in the model: "*" stands for any run of characters without a dot.
  std::string layers;
  Cut cut;
};

using Plan = std::vector<PlannedCut>;

class SplitOwner;

// What a model is that was cut.
//
// Ownership: shares the model's tensors and the group; the model does without this. Threading: as
// the group. Every rank calls what says that it communicates.
class ParallelizedModule {
 public:
  // What had to be put together because an operator needs all of it, since the beginning or
  // forget_gathers(); nothing where all was computed on parts.
  std::vector<Gathered> gathers() const;
  void forget_gathers();

  // Every parameter that is cut: what it is called, where its part lies in the whole, and the part
  // itself, an ordinary tensor that shares its memory.
  std::vector<nn::CutParameter> cut_parameters() const;

  // Every distinct parameter and buffer, whole: on the first rank, the others get none; one after
  // the other. Communicates.
  std::vector<NamedTensor> full_state_dict() const;
  // The reverse: the first rank has all of them, and other ranks' lists are not looked at.
  // UsageError on all ranks naming what is missing, unknown or of another shape. Communicates.
  void load_full_state_dict(const std::vector<NamedTensor>& state);

 private:
  friend ParallelizedModule parallelize_module(torch::nn::Module& module,
                                               std::shared_ptr<comm::Communicator> group,
                                               const Plan& plan);
  ParallelizedModule(std::shared_ptr<SplitOwner> owner, std::vector<NamedTensor> tensors)
      : owner_(std::move(owner)), tensors_(std::move(tensors)) {}

  std::shared_ptr<SplitOwner> owner_;
  std::vector<NamedTensor> tensors_;  // parameters and buffers
};

// Cuts the torch::nn::Linear and torch::nn::Embedding layers that a plan names over the ranks of a
// group, which all call it on the same model. Weights and buffers become those of the first rank.
// Parameters stay the same objects, of the sizes that they had, over the memory of a part.
//
// What is computed on parts: products with these weights, element-wise functions, dropout and views
// between them. Whatever else is called on something that is cut puts it together first, and says
// so: the answer is never another. Every rank runs the same operators in the same order, and, where
// there is dropout, with generators that were seeded alike.
//
// The model gets a child in each layer that is cut, which refuses torch::save() and torch::load().
//
// Failure: UsageError on all ranks, before anything is cut, for a pattern that no layer matches, a
// layer that two match, one that is no such layer or is cut already, sizes that do not divide,
// parameters that another module shares, a model that is wrapped already, and plans or models that
// differ between ranks.
ParallelizedModule parallelize_module(torch::nn::Module& module,
                                      std::shared_ptr<comm::Communicator> group, const Plan& plan);

// Of any tensor that is cut, as a parameter, its gradient, an optimizer's state or what a column's
// layer gives; of any other, itself.

bool is_cut(const at::Tensor& tensor);
// All of it, on every rank, which all call it; autograd follows.
at::Tensor full_tensor(const at::Tensor& tensor);
// This rank's part, which shares its memory; autograd does not follow.
at::Tensor local_part(const at::Tensor& tensor);

}  // namespace lockstep::tensor
