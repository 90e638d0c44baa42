// In what order ranks compute, for each kind of schedule. Only generate.cpp includes this.
#pragma once

#include <cstddef>
#include <vector>

#include <lockstep/parallel/pipeline/schedule/action.h>

namespace lockstep::pipeline {

// A list of actions that compute for each rank.
using Order = std::vector<std::vector<Action>>;

// All forwards, then all backwards, on a stage for each rank.
Order gpipe_order(int num_ranks, int num_micro_batches);

// As few forwards ahead of their backwards as keep the last stage busy. `backward` is the kind:
// the whole of it, or the input's.
Order one_forward_one_backward_order(int num_ranks, int num_micro_batches, ActionKind backward);

// The same with several stages a rank, stage s on rank s % num_ranks.
Order interleaved_order(int num_ranks, int num_micro_batches, int num_chunks);

// Forwards and inputs' backwards of ZB-V, two stages a rank: s and 2 num_ranks - 1 - s.
Order v_shaped_order(int num_ranks, int num_micro_batches);

// Puts a backward of the weights behind each of the input, with the time of each action as one: a
// rank does it while it has nothing else to do, or when a forward would make it hold more than
// `most_live` activations. Weights' gradients of a stage keep the order of micro-batches.
Order with_weights(const Order& order, std::size_t num_stages, int num_micro_batches,
                   int most_live);

}  // namespace lockstep::pipeline
