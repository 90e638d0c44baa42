// How a batch norm of LibTorch's, which knows nothing of us, comes to call us.
#pragma once

#include <memory>
#include <string>

#include <torch/nn/module.h>

#include <lockstep/intercept/owner.h>
#include <lockstep/parallel/replicate/synced_norm.h>

namespace lockstep::replicate {

// Proves once that it works with this LibTorch.
//
// Failure: UsageError saying who has the dispatch key that it takes, or what a batch norm did
// instead.
void check_batch_norms_can_be_redirected();

// For as long as what it returns lives, a BatchNorm1d, 2d or 3d sums its statistics with `sum`
// while it trains; null where the module is none. The module is not kept alive.
//
// Failure: UsageError naming a batch norm that has neither weights nor running statistics.
std::shared_ptr<intercept::Owner> redirect_batch_norm(
    const std::shared_ptr<torch::nn::Module>& module, const std::string& name,
    const std::shared_ptr<const SumOverRanks>& sum);

// Whether a batch norm still leads to that owner: not once it was loaded or converted.
bool leads_to(const torch::nn::Module& module, const intercept::Owner& owner);

}  // namespace lockstep::replicate
