// What a node of autograd's graph is to a backward pass in two halves.
#pragma once

#include <string>

namespace lockstep::pipeline {

// Both take what Node::name() says, as in "AddmmBackward0".

// Whether a node hands a gradient on in other sizes, places or types, and computes nothing with it:
// views, copies, casts. Where all that one leads to are parameters, it belongs to them.
bool only_passes_on(std::string name);

// Whether a node's gradient of its weight is worth waiting with: a product, a convolution, a
// look-up in a table. It is computed apart from the other gradients, at no cost, from what the node
// saved and the gradient of its result, which is therefore kept.
bool can_wait(std::string name);

}  // namespace lockstep::pipeline
