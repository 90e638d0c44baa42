// Writes what one rank has of a checkpoint's tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include <lockstep/checkpoint/format/manifest.h>

namespace lockstep::checkpoint {

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

// What the file of such pieces takes.
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
