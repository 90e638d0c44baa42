// Where the graph of one stage ends and that of the next begins.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep::pipeline {

// Outputs, as what a stage of the same rank is given: leaves, with which a graph of its own begins.
std::vector<at::Tensor> leaves_of(const std::vector<at::Tensor>& outputs);

// What a stage's forward is called with in place of leaves, into which its first operator could not
// write, as an activation in place does. Nothing is copied.
std::vector<at::Tensor> entered(const std::vector<at::Tensor>& leaves);

// One for each leaf: zeros where none came to one that wants one, as what is sent has it.
std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& leaves);

// A whole backward pass. An undefined gradient is that of a loss.
void backward_whole(const std::vector<at::Tensor>& outputs,
                    const std::vector<at::Tensor>& gradients);

}  // namespace lockstep::pipeline
