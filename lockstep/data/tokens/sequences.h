// Training sequences: windows of one length over a stream of tokens.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include <lockstep/data/tokens/token_stream.h>

namespace lockstep::data {

// Sequence k is tokens [k·L, k·L + L]: L inputs, and as targets the same shifted by one. Every
// token but the first is a target at most once; a remainder shorter than L is left out.
//
// Ownership: shares the stream; cheap to copy. Threading: read-only. Failure: UsageError with the
// numbers.
class SequenceSet {
 public:
  // UsageError where the stream is too short for one sequence.
  SequenceSet(std::shared_ptr<const TokenStream> stream, std::int64_t length);

  std::int64_t size() const { return size_; }
  std::int64_t length() const { return length_; }
  const TokenStream& stream() const { return *stream_; }

  // Of sequence `index`; both of length() tokens.
  void copy_input(std::int64_t index, std::span<std::int64_t> tokens) const;
  void copy_target(std::int64_t index, std::span<std::int64_t> tokens) const;

  struct Split;
  // The last `validation_fraction` of the sequences, to the nearest whole number, for validation
  // and those before them for training. No target of one side is a target of the other. UsageError
  // where a side would be empty.
  Split split(double validation_fraction) const;

 private:
  SequenceSet(std::shared_ptr<const TokenStream> stream, std::int64_t length, std::int64_t first,
              std::int64_t size);

  void copy(std::int64_t index, std::int64_t shift, std::span<std::int64_t> tokens) const;

  std::shared_ptr<const TokenStream> stream_;
  std::int64_t length_;
  std::int64_t first_ = 0;  // the stream's first token of sequence 0
  std::int64_t size_ = 0;
};

struct SequenceSet::Split {
  SequenceSet train;
  SequenceSet validation;
};

}  // namespace lockstep::data
