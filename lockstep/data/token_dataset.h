// Sequences of tokens as a dataset for language models.
#pragma once

#include <lockstep/data/dataset.h>
#include <lockstep/data/tokens/sequences.h>

namespace lockstep::data {

// Samples are a SequenceSet's sequences: input and target are [samples, length] of int64, the
// target the input shifted by one. Thread-safe.
class TokenDataset : public Dataset {
 public:
  explicit TokenDataset(SequenceSet sequences);

  const SequenceSet& sequences() const { return sequences_; }
  std::int64_t size() const override { return sequences_.size(); }
  Batch batch(std::span<const std::int64_t> indices) const override;

 private:
  SequenceSet sequences_;
};

}  // namespace lockstep::data
