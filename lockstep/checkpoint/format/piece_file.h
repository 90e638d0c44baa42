// Files in which ranks write a checkpoint's tensors. Every element is written once: ranks that hold
// the same elements share the work, and each writes its share to a file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/checkpoint/format/manifest.h>
#include <lockstep/checkpoint/safetensors/header.h>
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

// A rank tells the others which pieces it holds, in this text.
std::string to_text(std::span<const HeldPiece> pieces);
std::vector<HeldPiece> parse_held_pieces(std::string_view text);

// The elements of one of a rank's pieces that it writes, in local offsets.
struct WrittenPart {
  std::size_t piece = 0;
  mesh::Interval part;

  bool operator==(const WrittenPart&) const = default;
};

// Decides what each rank writes, in the order of its pieces. A piece that several ranks hold is
// written by the one of them that has least to write; if it is more than a rank's fair share of
// everything, by several. Pieces that overlap without being equal are each written. Every rank gets
// the same result.
std::vector<std::vector<WrittenPart>> share_out(std::span<const std::vector<HeldPiece>> ranks);

// The parts that a rank writes, as pieces.
std::vector<HeldPiece> written_pieces(std::span<const HeldPiece> pieces,
                                      std::span<const WrittenPart> parts);

// A piece of a tensor in this process' memory: the placement's elements, densely.
struct PieceInMemory {
  std::string tensor;
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape = {};  // of the whole tensor
  mesh::Placement placement = mesh::Placement::full({});
  std::span<const std::byte> bytes = {};
};

// "shard-00003.safetensors"
std::string piece_file_name(int rank);

// The size of the file of such pieces.
std::uint64_t piece_file_bytes(std::span<const PieceInMemory> pieces);

// One safetensors file, which is on disk when it returns, but for its name in the folder, which a
// commit syncs; gives its part of the manifest. Failure: FileError for the disk, or where it is
// told to stop; UsageError for a piece that is there twice.
Manifest write_piece_file(const std::filesystem::path& folder, const std::string& file,
                          std::span<const PieceInMemory> pieces, const std::stop_token& stop = {});

// A text beside it, as the manifest has it.
Manifest write_text_file(const std::filesystem::path& folder, const std::string& file,
                         const std::string& text);

}  // namespace lockstep::checkpoint
