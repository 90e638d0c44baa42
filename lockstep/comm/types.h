// The vocabulary of calls: operations, element types, reductions, algorithms. No LibTorch here: the
// transports and algorithms speak bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace lockstep::comm {

enum class Operation : std::uint8_t {
  all_reduce,
  all_gather,
  reduce_scatter,
  all_to_all,
  broadcast,
  exchange,
  barrier,
  split,
};

enum class DType : std::uint8_t {
  float32,
  float64,
  float16,
  bfloat16,
  int32,
  int64,
  uint8,
  boolean,
};

// mean divides the whole sum once, at the end. On booleans sum and max are "or", min is "and".
// NaN wins over numbers in min and max, as in torch::minimum and torch::maximum.
enum class ReduceOp : std::uint8_t { sum, mean, min, max };

// Who moves what to whom. Every one of them adds in the same order (reduction_tree.h), so the
// choice changes the time and never a bit of the result; but for NCCL.
enum class Algorithm : std::uint8_t {
  automatic,
  direct,            // every rank to every rank at once: fewest rounds, most connections
  tree,              // up and down a binary tree: fewest bytes on the wire for tiny messages
  ring,              // pieces pass from neighbour to neighbour: one stream in, one out
  halving_doubling,  // pairs at distance 1, 2, 4, …: log₂ n rounds
  hierarchical,      // inside each host first, then across
  nccl,              // NCCL's own, which nobody asks for: what a call of tensors on GPUs says it is
};

const char* name(Operation operation);
const char* name(DType dtype);
const char* name(ReduceOp op);
const char* name(Algorithm algorithm);

// From the names above; UsageError that lists them otherwise.
Algorithm algorithm_from_name(const std::string& text);

std::size_t size_of(DType dtype);

}  // namespace lockstep::comm
