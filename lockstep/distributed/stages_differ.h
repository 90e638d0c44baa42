// Whether the ranks of a pipeline hold stages of a model, or each of them all of it.
#pragma once

#include <torch/nn/module.h>

#include <lockstep/comm/communicator.h>

namespace lockstep {

// Every rank of a pipeline calls it with what it was given as its stage. UsageError on all of them
// where all have the same parameters: each would train a whole model on its own, and all of them
// the same one.
void check_stages_differ(const torch::nn::Module& stage, comm::Communicator& group);

}  // namespace lockstep
