// Recomputation of a model's blocks, chosen from outside the model.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/pimpl.h>

#include <lockstep/base/held_module.h>
#include <lockstep/recompute/recompute.h>

namespace lockstep {

// A ModuleList whose blocks can be recomputed from outside the model, because the model's forward
// calls them through the list. Parameters have the same names as in a ModuleList.
//
//   for (std::size_t i = 0; i < blocks->size(); ++i) x = blocks->call<Block>(i, x, mask);
//
// Ownership, threading: as ModuleList.
class BlockListImpl : public torch::nn::ModuleListImpl {
 public:
  BlockListImpl() = default;
  // For blocks that read other state than their inputs and themselves, which may change before
  // backward: `snapshot` saves that state and restores it.
  explicit BlockListImpl(activations::Snapshot snapshot) : snapshot_(std::move(snapshot)) {}

  // Calls forward(inputs…) of block i.
  template <typename Block, typename... Inputs>
  auto call(std::size_t i, const Inputs&... inputs) {
    auto block = ptr<held_module<Block>>(i);
    TORCH_CHECK(block, "block ", i, " of the list is of another type than the one it is called as");
    if (!recomputes(i)) return block->forward(inputs...);
    return activations::recompute_in({.snapshot = snapshot_}, std::move(block), inputs...);
  }

  bool recomputes(std::size_t i) const { return i < recomputed_.size() && recomputed_[i]; }
  void set_recomputed(std::size_t i) {
    if (recomputed_.size() <= i) recomputed_.resize(i + 1);
    recomputed_[i] = true;
  }

  std::shared_ptr<torch::nn::Module> clone(
      const torch::optional<torch::Device>& device = torch::nullopt) const override;
  void pretty_print(std::ostream& stream) const override;

 private:
  activations::Snapshot snapshot_;
  std::vector<bool> recomputed_;
};

TORCH_MODULE(BlockList);

namespace activations {

// Chooses the modules of a model that are recomputed.
struct Policy {
  // Gets a module and its name in the model.
  std::function<bool(const std::string& name, const torch::nn::Module& module)> is_block;
  // The last block of every `every` consecutive ones is recomputed.
  std::size_t every = 1;
};

template <typename... Blocks>
Policy blocks_of() {
  static_assert((std::is_base_of_v<torch::nn::Module, held_module<Blocks>> && ...),
                "these are types of modules, or of their holders (TORCH_MODULE)");
  return {.is_block = [](const std::string&, const torch::nn::Module& module) {
    return (... || (dynamic_cast<const held_module<Blocks>*>(&module) != nullptr));
  }};
}

}  // namespace activations

// From now on, the blocks that the policy chooses are recomputed in backward (see recompute()).
// Returns their number.
//
//   wrap_activation_checkpointing(*model, activations::blocks_of<Block>());
//
// This works for modules that a torch::nn::Sequential or a BlockList calls. Modules and the names
// of parameters stay; a Sequential's at<Block>(i) and ptr<Block>(i) no longer work for them, but
// its ptr(i) does. UsageError for a policy that chooses nothing, and for a module that other code
// calls: a C++ module's forward cannot be intercepted, so that code has to call recompute(block,
// x). The model is then unchanged.
std::size_t wrap_activation_checkpointing(torch::nn::Module& model,
                                          const activations::Policy& policy);

// Recomputes a share of a model's blocks, evenly spread: with 0.5 every second one. The blocks are
// the elements of a Sequential, ModuleList or BlockList that have child modules, if several there
// have the same type. UsageError as above, if there are none, and for a share outside [0, 1].
class SelectiveGradientCheckpointing {
 public:
  SelectiveGradientCheckpointing(torch::nn::Module& model, double ratio);

  std::size_t num_blocks() const { return num_blocks_; }
  std::size_t num_recomputed() const { return num_recomputed_; }

 private:
  std::size_t num_blocks_ = 0;
  std::size_t num_recomputed_ = 0;
};

}  // namespace lockstep

namespace lockstep::names {

using lockstep::SelectiveGradientCheckpointing;
using lockstep::wrap_activation_checkpointing;

}  // namespace lockstep::names
