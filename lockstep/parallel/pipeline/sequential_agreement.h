// That the ranks of a pipeline cut the same Sequential, in the same way.
#pragma once

#include <string>
#include <vector>

#include <torch/nn/modules/container/sequential.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/parallel/pipeline/sequential_parts.h>

namespace lockstep::pipeline {

// Every rank calls it. UsageError, the same on all of them, with the first line that differs.
void check_same_lines(const std::vector<std::string>& lines, comm::Communicator& group,
                      c10::Device device);

// Every rank calls it. UsageError, the same on all of them, where any was given what cannot be cut,
// or their children, the tensors in these, which of those are one, or cuts differ.
void agree_on_sequential(const torch::nn::Sequential& model, const std::vector<int>& rank_of_stage,
                         comm::Communicator& group, const SequentialCut& cut, c10::Device device);

// Parameters and buffers that children of several ranks share become those of the first that has
// them. Every rank calls it, while it still has all of them.
void share_from_first_holder(const std::vector<torch::nn::Sequential>& stages,
                             const std::vector<int>& rank_of_stage, comm::Communicator& group,
                             c10::Device device);

// Parameters and buffers.
std::vector<at::Tensor> tensors_of(const torch::nn::Module& module);

}  // namespace lockstep::pipeline
