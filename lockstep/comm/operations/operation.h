// The vocabulary of calls: operations, element types, reductions, algorithms. No LibTorch here: the
// transports and algorithms speak bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
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

// An algorithm says which rank moves what to which. All of them but NCCL's add in the same order
// (algorithms/reduction.h), so the choice changes the time and never a bit of the result.
enum class Algorithm : std::uint8_t {
  automatic,
  direct,            // every rank to every rank at once: fewest rounds, most connections
  tree,              // up and down a binary tree: fewest bytes on the wire for tiny messages
  ring,              // pieces pass from neighbour to neighbour: one stream in, one out
  halving_doubling,  // pairs at distance 1, 2, 4, …: log₂ n rounds
  hierarchical,      // inside each host first, then across
  nccl,              // NCCL's own: calls of tensors on GPUs carry it, and no caller asks for it
};

const char* name(Operation operation);
const char* name(DType dtype);
const char* name(ReduceOp op);
const char* name(Algorithm algorithm);

// The algorithm of this name; UsageError, with the names above, if there is none.
Algorithm algorithm_from_name(const std::string& text);

std::size_t size_of(DType dtype);

// Identifies a call: two ranks whose fingerprints differ are not in the same call, and find out
// before they use any of its data. It travels in every message, so its layout is fixed, without
// padding.
struct Fingerprint {
  // number of the call in its group; an exchange counts by pair of ranks
  std::uint64_t sequence = 0;
  std::uint64_t count = 0;       // elements; those of all ranks together if the sizes are even
  std::uint32_t generation = 0;  // the group's generation
  std::int32_t root = -1;        // root of a broadcast; elsewhere the caller's subject
  Operation operation = Operation::barrier;
  DType dtype = DType::uint8;
  ReduceOp reduce_op = ReduceOp::sum;
  Algorithm algorithm = Algorithm::automatic;
  std::uint16_t tensors = 1;  // tensors in the list; more count as 65535
  std::uint16_t sizes = 0;    // a hash of the tensors' lengths, where those must agree

  bool operator==(const Fingerprint& other) const;

  // Such as "all_reduce #7 (sum of 1024 float32)": what a wait for a call says.
  std::string text() const;
  // With the number of the caller's subject, where there is one: what ranks in different calls say.
  std::string text_with_subject() const;
};
static_assert(sizeof(Fingerprint) == 32);

// A message with texts of text_with_subject() in it, in which numbers of subjects, which mean
// nothing to a reader, are replaced: by ", " and what `name_of` returns for them, or by nothing
// where that is empty.
std::string name_subjects(std::string message,
                          const std::function<std::string(std::int32_t subject)>& name_of);

}  // namespace lockstep::comm
