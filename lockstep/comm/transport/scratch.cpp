#include <lockstep/comm/transport/scratch.h>

namespace lockstep::comm {

namespace {

// What a small call needs is not worth asking for again and again.
constexpr std::size_t kMostKept = 64u << 10;

}  // namespace

std::span<std::byte> Scratch::take(std::size_t bytes) {
  if (num_taken_ == pieces_.size()) pieces_.emplace_back();
  Piece& piece = pieces_[num_taken_];
  if (piece.bytes < bytes) {
    piece.memory = std::make_unique_for_overwrite<std::byte[]>(bytes);
    piece.bytes = bytes;
  }
  ++num_taken_;
  return {piece.memory.get(), bytes};
}

void Scratch::shrink() {
  num_taken_ = 0;
  if (pieces_.size() > 1) pieces_.resize(1);
  if (!pieces_.empty() && pieces_.front().bytes > kMostKept) pieces_.clear();
}

}  // namespace lockstep::comm
