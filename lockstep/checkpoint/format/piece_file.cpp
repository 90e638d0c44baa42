#include <lockstep/checkpoint/format/piece_file.h>

#include <algorithm>
#include <map>

#include <lockstep/base/durable_file.h>
#include <lockstep/checkpoint/safetensors/writer.h>

namespace lockstep::checkpoint {

namespace {

// In the shape of its box where it has all of one.
std::vector<TensorDeclaration> declarations_of(std::span<const PieceInMemory> pieces) {
  std::vector<TensorDeclaration> declarations;
  for (const PieceInMemory& piece : pieces) {
    const mesh::Placement& placement = piece.placement;
    std::vector<std::int64_t> shape =
        placement.whole_tensor()
            ? piece.shape
            : (placement.whole_box() ? placement.box_shape() : std::vector{placement.elements()});
    declarations.push_back({piece_name(piece.tensor, placement), piece.dtype, std::move(shape)});
  }
  return declarations;
}

// A stretch is still in the processor's cache when it is written.
std::vector<ContentHash> write_hashed(SafetensorsWriter& writer, std::span<const std::byte> bytes,
                                      const std::stop_token& stop) {
  std::vector<ContentHash> hashes;
  while (!bytes.empty()) {
    if (stop.stop_requested()) throw FileError("nobody waits for this file any more");
    const auto stretch = bytes.first(std::min<std::size_t>(bytes.size(), kHashedBytes));
    hashes.push_back(content_hash(stretch));
    writer.write(stretch);
    bytes = bytes.subspan(stretch.size());
  }
  return hashes;
}

}  // namespace

std::string piece_file_name(int rank) { return fmt::format("shard-{:05}.safetensors", rank); }

std::uint64_t piece_file_bytes(std::span<const PieceInMemory> pieces) {
  return plan_safetensors(declarations_of(pieces), {}).file_bytes();
}

Manifest write_piece_file(const std::filesystem::path& folder, const std::string& file,
                          std::span<const PieceInMemory> pieces, const std::stop_token& stop) {
  std::map<std::string, const PieceInMemory*> by_name;
  for (const PieceInMemory& piece : pieces) {
    LOCKSTEP_CHECK(piece.bytes.size() == piece_bytes(piece.dtype, piece.placement),
                   "{} bytes of {} {}", piece.bytes.size(), piece.tensor, piece.placement.text());
    by_name.emplace(piece_name(piece.tensor, piece.placement), &piece);
  }
  const auto declarations = declarations_of(pieces);
  SafetensorsWriter writer(folder / file, declarations);
  const SafetensorsLayout layout = plan_safetensors(declarations, {});
  Manifest part;
  for (const TensorEntry& entry : writer.entries()) {
    const PieceInMemory& piece = *by_name.at(entry.name);
    auto& tensor =
        part.tensors.try_emplace(piece.tensor, TensorRecord{piece.dtype, piece.shape, {}})
            .first->second;
    tensor.pieces.push_back({file, piece.placement, write_hashed(writer, piece.bytes, stop)});
  }
  writer.commit(DurableFile::Folder::is_left);
  part.files[file] = {.bytes = layout.file_bytes(),
                      .head_bytes = layout.header.size(),
                      .hash = content_hash(layout.header)};
  return part;
}

Manifest write_text_file(const std::filesystem::path& folder, const std::string& file,
                         const std::string& text) {
  write_durably(folder / file, text, DurableFile::Folder::is_left);
  Manifest part;
  part.files[file] = {.bytes = text.size(), .head_bytes = text.size(), .hash = content_hash(text)};
  return part;
}

}  // namespace lockstep::checkpoint
