// Who writes what of a checkpoint: every element once, ranks that hold the same share the work.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/checkpoint/safetensors/dtype.h>
#include <lockstep/mesh/placement/placement.h>

namespace lockstep::checkpoint {

// A piece of a tensor that a rank holds.
struct HeldPiece {
  std::string tensor;
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape = {};  // of the whole tensor
  mesh::Placement placement = mesh::Placement::full({});

  std::uint64_t bytes() const;

  bool operator==(const HeldPiece&) const = default;
};

// What a rank tells the others of its own, and what they read.
std::string to_text(std::span<const HeldPiece> pieces);
std::vector<HeldPiece> parse_held_pieces(std::string_view text);

// Which elements of a rank's piece it writes, in local offsets.
struct WrittenPart {
  std::size_t piece = 0;
  mesh::Interval part;

  bool operator==(const WrittenPart&) const = default;
};

// For each rank, in the order of its pieces. A piece that several ranks hold is written by the one
// of them that has least to write; one that is more than a rank's fair share of everything, by
// several. Pieces that overlap without being the same are each written. The same on every rank.
std::vector<std::vector<WrittenPart>> share_out(std::span<const std::vector<HeldPiece>> ranks);

// What a rank writes, as pieces of their own.
std::vector<HeldPiece> written_pieces(std::span<const HeldPiece> pieces,
                                      std::span<const WrittenPart> parts);

}  // namespace lockstep::checkpoint
