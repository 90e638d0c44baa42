#include <lockstep/checkpoint/format/piece_file.h>

#include <algorithm>
#include <map>
#include <tuple>

#include <nlohmann/json.hpp>

#include <lockstep/base/durable_file.h>
#include <lockstep/base/error.h>
#include <lockstep/checkpoint/safetensors/writer.h>

namespace lockstep::checkpoint {

namespace {

using nlohmann::json;

// A piece, and the ranks that hold it.
struct Shared {
  struct Holder {
    std::size_t rank = 0;
    std::size_t piece = 0;  // among its own
  };
  std::uint64_t bytes = 0;
  std::int64_t elements = 0;
  std::vector<Holder> holders;
};

std::vector<Shared> by_piece(std::span<const std::vector<HeldPiece>> ranks) {
  std::map<std::pair<std::string, std::string>, Shared> all;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank)
    for (std::size_t i = 0; i < ranks[rank].size(); ++i) {
      const HeldPiece& piece = ranks[rank][i];
      const std::int64_t elements = piece.placement.elements();
      // A tensor without elements must still be listed by one rank.
      if (elements == 0 && piece.placement.logical_elements() > 0) continue;
      Shared& shared = all[{piece.tensor, piece.placement.text()}];
      shared.bytes = piece.bytes();
      shared.elements = elements;
      shared.holders.push_back({rank, i});
    }
  std::vector<Shared> pieces;
  pieces.reserve(all.size());
  for (auto& [key, shared] : all) pieces.push_back(std::move(shared));
  // Shares out large pieces first, so that the small ones even out the loads.
  std::ranges::stable_sort(pieces, std::ranges::greater(), &Shared::bytes);
  return pieces;
}

json pair_of(mesh::Interval interval) { return json::array({interval.begin, interval.end}); }

mesh::Interval interval_of(const json& pair) {
  return {pair.at(0).get<std::int64_t>(), pair.at(1).get<std::int64_t>()};
}

}  // namespace

std::uint64_t HeldPiece::bytes() const {
  return static_cast<std::uint64_t>(placement.elements()) * (bits_of(dtype) / 8);
}

std::string to_text(std::span<const HeldPiece> pieces) {
  json all = json::array();
  for (const HeldPiece& piece : pieces) {
    json box = json::array();
    for (const mesh::Interval& side : piece.placement.box()) box.push_back(pair_of(side));
    all.push_back(
        json::array({piece.tensor, name(piece.dtype), piece.shape, piece.placement.shape(),
                     std::move(box), pair_of(piece.placement.range())}));
  }
  return all.dump();
}

std::vector<HeldPiece> parse_held_pieces(std::string_view text) {
  std::vector<HeldPiece> pieces;
  // The text comes from another rank of the job, over an authenticated connection.
  for (const json& one : json::parse(text)) {
    const auto dtype = dtype_from_name(one.at(1).get<std::string>());
    LOCKSTEP_CHECK(dtype.has_value(), "a piece of {}", one.at(1).get<std::string>());
    auto placement = mesh::Placement::full(one.at(3).get<std::vector<std::int64_t>>());
    for (std::size_t dim = 0; dim < one.at(4).size(); ++dim)
      placement = placement.cut_dim(static_cast<int>(dim), interval_of(one.at(4).at(dim)));
    pieces.push_back({one.at(0).get<std::string>(), *dtype,
                      one.at(2).get<std::vector<std::int64_t>>(),
                      placement.cut_flat(interval_of(one.at(5)))});
  }
  return pieces;
}

std::vector<std::vector<WrittenPart>> share_out(std::span<const std::vector<HeldPiece>> ranks) {
  const std::vector<Shared> pieces = by_piece(ranks);
  std::uint64_t total = 0;
  for (const Shared& piece : pieces) total += piece.bytes;
  const std::uint64_t fair =
      std::max<std::uint64_t>(1, total / std::max<std::size_t>(1, ranks.size()));
  std::vector<std::uint64_t> load(ranks.size());
  std::vector<std::vector<WrittenPart>> written(ranks.size());
  for (const Shared& piece : pieces) {
    auto holders = piece.holders;
    std::ranges::stable_sort(holders, {}, [&](const auto& holder) { return load[holder.rank]; });
    const std::uint64_t wanted = piece.bytes / fair + (piece.bytes % fair == 0 ? 0 : 1);
    const auto parts = static_cast<int>(
        std::clamp<std::uint64_t>(wanted, 1, static_cast<std::uint64_t>(holders.size())));
    for (int part = 0; part < parts; ++part) {
      const auto& holder = holders[static_cast<std::size_t>(part)];
      const auto mine = mesh::part_of(piece.elements, part, parts);
      written[holder.rank].push_back({holder.piece, mine});
      load[holder.rank] += piece.bytes / static_cast<std::uint64_t>(parts);
    }
  }
  for (auto& of_rank : written) std::ranges::stable_sort(of_rank, {}, &WrittenPart::piece);
  return written;
}

std::vector<HeldPiece> written_pieces(std::span<const HeldPiece> pieces,
                                      std::span<const WrittenPart> parts) {
  std::vector<HeldPiece> written;
  for (const WrittenPart& part : parts) {
    HeldPiece& piece = written.emplace_back(pieces[part.piece]);
    piece.placement = piece.placement.cut_flat(part.part);
  }
  return written;
}

namespace {

// A piece that is a whole box is declared in the box's shape.
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
