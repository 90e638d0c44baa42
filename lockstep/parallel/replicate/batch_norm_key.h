// How a batch norm of LibTorch's, which knows nothing of us, comes to call us.
#pragma once

#include <memory>
#include <string>

#include <torch/nn/module.h>

#include <lockstep/parallel/replicate/synced_norm.h>

namespace lockstep::replicate {

// Registers our functions under a dispatch key that LibTorch itself has no use for; the first call
// also proves that nobody else has the key, and that a batch norm that carries it comes to us.
//
// Failure: UsageError saying who has the key, or what a batch norm did instead.
void claim_batch_norm_key();

// From now on a BatchNorm1d, 2d or 3d sums its statistics with `sum` while it trains, for as long
// as both live; false where the module is none. Neither is kept alive. After
// claim_batch_norm_key().
//
// Failure: UsageError naming a batch norm that has neither weights nor running statistics.
bool redirect_batch_norm(const std::shared_ptr<torch::nn::Module>& module, const std::string& name,
                         const std::shared_ptr<const SumOverRanks>& sum);

// Makes those that use `sum` LibTorch's own again.
void release_batch_norms(const SumOverRanks* sum);

}  // namespace lockstep::replicate
