// Recomputation of a model's blocks, chosen from outside the model.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <type_traits>

#include <torch/nn/module.h>

#include <lockstep/base/held_module.h>

namespace lockstep {

namespace activations {

// Which modules of a model are recomputed.
struct Policy {
  // Told the module's name in the model and the module.
  std::function<bool(const std::string& name, const torch::nn::Module& module)> is_block;
  // Of the modules that are blocks, in their order: the last of each so many.
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

// From now on, blocks that the policy chooses are recomputed in backward (see recompute()). Returns
// how many.
//
//   wrap_activation_checkpointing(*model, activations::blocks_of<Block>());
//
// This can be done from outside for what a torch::nn::Sequential or a BlockList calls. Names of
// parameters stay, and so do the modules; a Sequential's at<Block>(i) and ptr<Block>(i) no longer
// work for them, but its ptr(i) does. UsageError for a policy that chooses nothing, or a module
// that is called by other code, where forward itself has to say recompute(block, x): a C++ module's
// forward cannot be intercepted. The model is then as it was.
std::size_t wrap_activation_checkpointing(torch::nn::Module& model,
                                          const activations::Policy& policy);

// Recomputes a share of a model's blocks, evenly spread: 0.5 is every second. The blocks are those
// elements of a Sequential, ModuleList or BlockList that are not alone of their type there and have
// modules of their own. UsageError as above, where there are none, and for a share outside [0, 1].
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
