// ZeRO++: fewer bytes between nodes, for some of the numbers' digits.
#pragma once

#include <memory>
#include <vector>

#include <lockstep/comm/communicator.h>
#include <lockstep/comm/quantized.h>
#include <lockstep/mesh/tensors.h>

namespace lockstep::shard {

struct ZeroPlusPlusConfig {
  // Parameters are gathered as int8, in blocks with a scale each (qwZ).
  bool quantize_weights = false;
  // Gradients are summed from int4, in blocks with a scale each (qgZ).
  bool quantize_gradients = false;
  // So many consecutive ranks make a node, and keep a copy of the model among them from the first
  // gather after a step to the next step (hpZ): gathers in between do not leave the node, and
  // quantized gradients are summed inside of it first. 0 or 1: no nodes.
  int hierarchical_partition = 0;

  bool has_nodes() const { return hierarchical_partition > 1; }
};

// UsageError where a parameter's type cannot be quantized.
void check_quantizes(const ZeroPlusPlusConfig& config, const std::vector<NamedTensor>& parameters);

// The same ranks as nodes; null where there are none.
struct Nodes {
  std::shared_ptr<comm::Communicator> gather;  // the ranks of this one's node
  comm::NodeGroups reduce;
};

// Every rank calls it. UsageError, with the numbers, where ranks cannot be divided so.
Nodes make_nodes(const ZeroPlusPlusConfig& config, comm::Communicator& gather,
                 comm::Communicator& reduce);

}  // namespace lockstep::shard
