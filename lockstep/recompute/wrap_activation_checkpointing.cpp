#include <lockstep/recompute/wrap_activation_checkpointing.h>

#include <vector>

#include <lockstep/base/error.h>
#include <lockstep/recompute/block_places.h>
#include <lockstep/recompute/share_of_blocks.h>

namespace lockstep {

namespace {

// All of them or none.
void set_recomputed(const std::vector<activations::BlockPlace>& places) {
  for (const auto& place : places)
    if (!place.set_recomputed)
      throw UsageError(
          "'{}' cannot be recomputed from outside the model, since nothing comes between its "
          "forward and the code that calls it. In that code, write lockstep::recompute(block, x) "
          "for block->forward(x), or hold the blocks in a lockstep::BlockList in place of a "
          "ModuleList and write blocks->call<Block>(i, x)",
          place.name);
  for (const auto& place : places) place.set_recomputed();
}

}  // namespace

std::size_t wrap_activation_checkpointing(torch::nn::Module& model,
                                          const activations::Policy& policy) {
  if (policy.every == 0)
    throw UsageError("a policy of activation checkpointing names every 0th block: give at least 1");
  std::size_t num_blocks = 0;
  std::vector<activations::BlockPlace> chosen;
  for (auto& place : activations::places_in(model))
    if (policy.is_block(place.name, *place.module) && ++num_blocks % policy.every == 0)
      chosen.push_back(std::move(place));
  if (chosen.empty())
    throw UsageError(
        "activation checkpointing would recompute nothing: {} of the modules below the model are "
        "blocks by the policy, and every {} of them is recomputed",
        num_blocks, policy.every);
  set_recomputed(chosen);
  return chosen.size();
}

SelectiveGradientCheckpointing::SelectiveGradientCheckpointing(torch::nn::Module& model,
                                                               double ratio) {
  if (!(ratio >= 0.0 && ratio <= 1.0))
    throw UsageError("the share of blocks to recompute is {}: give a number from 0 to 1", ratio);
  const auto blocks = activations::repeated_blocks(model);
  if (blocks.empty())
    throw UsageError(
        "the model has no Sequential, ModuleList or BlockList with several blocks of one type: say "
        "what its blocks are, by wrap_activation_checkpointing(model, policy)");
  num_blocks_ = blocks.size();
  num_recomputed_ = activations::num_recomputed(num_blocks_, ratio);
  std::vector<activations::BlockPlace> chosen;
  for (std::size_t i = 0; i < num_blocks_; ++i)
    if (activations::is_recomputed(i, num_blocks_, ratio)) chosen.push_back(blocks[i]);
  set_recomputed(chosen);
}

}  // namespace lockstep
