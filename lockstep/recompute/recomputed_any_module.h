// Recomputation of what a Sequential holds.
#pragma once

namespace torch::nn {
class AnyModule;
}

namespace lockstep::activations {

// Has what the AnyModule holds recomputed whenever it is called through it, whatever it takes and
// returns. Done a second time it changes nothing.
void set_recomputed(torch::nn::AnyModule& module);

}  // namespace lockstep::activations
