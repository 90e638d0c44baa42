#include <lockstep/data/tokens/sequences.h>

#include <cmath>
#include <utility>

#include <lockstep/base/error.h>

namespace lockstep::data {

SequenceSet::SequenceSet(std::shared_ptr<const TokenStream> stream, std::int64_t length)
    : stream_(std::move(stream)), length_(length) {
  if (length_ < 1) throw UsageError("a sequence of {} tokens: sequences have at least 1", length_);
  size_ = (stream_->size() - 1) / length_;
  if (size_ < 1)
    throw UsageError(
        "'{}'{} has {} tokens, but one sequence of length {} takes {} (its targets are shifted by "
        "one): give more text, or a shorter sequence length",
        stream_->files().front().path().string(),
        stream_->files().size() > 1 ? fmt::format(" and {} more", stream_->files().size() - 1) : "",
        stream_->size(), length_, static_cast<std::uint64_t>(length_) + 1);
}

SequenceSet::SequenceSet(std::shared_ptr<const TokenStream> stream, std::int64_t length,
                         std::int64_t first, std::int64_t size)
    : stream_(std::move(stream)), length_(length), first_(first), size_(size) {}

void SequenceSet::copy(std::int64_t index, std::int64_t shift,
                       std::span<std::int64_t> tokens) const {
  if (index < 0 || index >= size_) throw UsageError("asked for sequence {} of {}", index, size_);
  if (std::ssize(tokens) != length_)
    throw UsageError("a place for {} tokens was given for a sequence of {}", tokens.size(),
                     length_);
  stream_->copy(first_ + index * length_ + shift, tokens);
}

void SequenceSet::copy_input(std::int64_t index, std::span<std::int64_t> tokens) const {
  copy(index, 0, tokens);
}

void SequenceSet::copy_target(std::int64_t index, std::span<std::int64_t> tokens) const {
  copy(index, 1, tokens);
}

SequenceSet::Split SequenceSet::split(double validation_fraction) const {
  // Written so that NaN fails, too.
  if (!(validation_fraction > 0 && validation_fraction < 1))
    throw UsageError("a validation fraction of {}: it must lie between 0 and 1, both excluded",
                     validation_fraction);
  const auto validation =
      static_cast<std::int64_t>(std::llround(static_cast<double>(size_) * validation_fraction));
  const std::int64_t train = size_ - validation;
  if (validation < 1 || train < 1)
    throw UsageError(
        "a validation fraction of {} of {} sequences of {} tokens leaves {} for validation and {} "
        "for training: give more text, a shorter sequence length or another fraction",
        validation_fraction, size_, length_, validation, train);
  return {.train = {stream_, length_, first_, train},
          .validation = {stream_, length_, first_ + train * length_, validation}};
}

}  // namespace lockstep::data
