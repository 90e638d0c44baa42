// Cuts a graph of autograd's where it comes to weights.
#pragma once

#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/parallel/pipeline/half_nodes.h>

namespace lockstep::pipeline {

using Parameters = std::unordered_set<const c10::TensorImpl*>;

// Changes the edges of the nodes that `roots` lead to, and the roots, so that they lead to no
// parameter, and returns what is to be run to come to those. `gradients` are of the roots; those of
// roots that are nothing but parameters leave both lists.
std::vector<WeightPartPointer> cut(torch::autograd::edge_list& roots,
                                   std::vector<at::Tensor>& gradients,
                                   const Parameters& parameters);

}  // namespace lockstep::pipeline
