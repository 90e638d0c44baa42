// A shuffled order that is computed where it is looked at.
#pragma once

#include <cstdint>

namespace lockstep::data {

// A pseudo-random permutation of [0, size) as a function of (seed, epoch): any place of it at once
// and without memory, so that a resumed run starts anywhere. The same on every machine and in every
// version. A Feistel network over Philox on the next larger power of four, walked along its cycles
// until it is back inside: at most four steps on average (for sizes under 64 more, but never more
// than 256 for all places together).
//
// A value. Thread-safe.
class Permutation {
 public:
  // UsageError for a negative size or one of more than 2^62.
  Permutation(std::int64_t size, std::uint64_t seed, std::int64_t epoch);

  std::int64_t size() const { return size_; }

  // What stands at `place`, which is in [0, size).
  std::int64_t operator()(std::int64_t place) const;

 private:
  std::uint64_t step(std::uint64_t value) const;

  std::int64_t size_;
  std::uint64_t key_;
  std::uint64_t epoch_;
  int half_bits_;
};

}  // namespace lockstep::data
