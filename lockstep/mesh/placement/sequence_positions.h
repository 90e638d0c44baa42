// The positions of a sequence that each rank of a context-parallel group holds. Plain numbers: no
// LibTorch.
#pragma once

#include <cstdint>
#include <vector>

#include <lockstep/mesh/placement/placement.h>

namespace lockstep::mesh {

enum class SplitKind {
  contiguous,  // rank r of c holds part r of c. Under a causal mask the last rank has most to do
  zigzag,      // rank r holds chunks r and 2c-1-r of 2c: under a causal mask all do the same work
};

const char* name(SplitKind kind);

// How the ranks that share a sequence attend over all of it.
enum class ContextAlgorithm {
  // Keys and values travel round the ranks while attention computes. Any number of heads; a rank
  // never holds more than its part of the sequence and a piece of another's.
  ring,
  // Ulysses: all-to-all from some positions of all heads to all positions of some heads, attention
  // on those, and back. Fewer and larger messages; needs heads that divide by the ranks.
  all_to_all,
};

const char* name(ContextAlgorithm algorithm);

// One rank's place in the split of a sequence.
struct SequencePart {
  int rank = 0;
  int size = 1;  // ranks that hold the sequence together
  SplitKind kind = SplitKind::zigzag;
};

// A length must be a multiple of this: c ranks, or 2c for zigzag; 1 where one rank holds all.
std::int64_t length_multiple(int size, SplitKind kind);

// How many positions each rank holds. UsageError, with the lengths next to it that would do, where
// the length does not divide.
std::int64_t local_length(std::int64_t length, int size, SplitKind kind);

// The positions themselves, ascending, in the order in which the rank's part has them; intervals
// that touch are one.
std::vector<Interval> positions(std::int64_t length, const SequencePart& part);

namespace internal {

// The queries of one rank that see keys of another, in offsets into their parts. For every pair of
// ranks this is one rectangle; for a rank and itself, a triangle.
struct BlockSight {
  Interval queries;
  Interval keys;
  bool causal = false;  // query i of these sees the keys up to i, else each sees all

  bool empty() const { return queries.size() == 0 || keys.size() == 0; }
};

BlockSight sight_of(const SequencePart& queries, int keys_rank, std::int64_t local_length,
                    bool causal);

}  // namespace internal

}  // namespace lockstep::mesh
