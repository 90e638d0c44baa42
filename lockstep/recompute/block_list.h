// The blocks of a model whose forward calls them one by one.
#pragma once

#include <cstddef>
#include <memory>
#include <ostream>
#include <utility>
#include <vector>

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/pimpl.h>

#include <lockstep/base/held_module.h>
#include <lockstep/recompute/recompute.h>

namespace lockstep {

// A ModuleList, with the same names of parameters, whose blocks can be recomputed without a word
// about it in the model: its forward calls them through the list.
//
//   for (std::size_t i = 0; i < blocks->size(); ++i) x = blocks->call<Block>(i, x, mask);
//
// Ownership, threading: as ModuleList.
class BlockListImpl : public torch::nn::ModuleListImpl {
 public:
  BlockListImpl() = default;
  // For blocks that read something which is neither input nor part of them, and which may change
  // before backward: `snapshot` is how to set it back.
  explicit BlockListImpl(activations::Snapshot snapshot) : snapshot_(std::move(snapshot)) {}

  // forward(inputs…) of block i.
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

}  // namespace lockstep
