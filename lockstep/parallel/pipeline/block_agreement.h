// That the ranks of a pipeline cut the same model, in the same way.
#pragma once

#include <string>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/parallel/pipeline/cut_blocks.h>
#include <lockstep/parallel/pipeline/model_block.h>

namespace lockstep::pipeline {

// Every rank calls it. UsageError, the same on all of them, with the first line that differs.
void check_same_lines(const std::vector<std::string>& lines, comm::Communicator& group);

// Every rank calls it. UsageError, the same on all of them, where any was given what cannot be cut
// (`fault` says what, where the caller knows), or their blocks, the tensors in these, which of
// those are one, or cuts differ.
void agree_on_blocks(const torch::nn::Module& model, const std::vector<ModelBlock>& blocks,
                     const std::vector<int>& rank_of_stage, comm::Communicator& group,
                     const BlockCut& cut, std::string fault);

// Parameters and buffers that stages of several ranks share become those of the first that has
// them. Every rank calls it, while it still has all of them.
void share_from_first_holder(const StageTensors& stages, const std::vector<int>& rank_of_stage,
                             comm::Communicator& group);

}  // namespace lockstep::pipeline
