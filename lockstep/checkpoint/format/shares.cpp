#include <lockstep/checkpoint/format/shares.h>

#include <algorithm>
#include <map>
#include <tuple>

#include <nlohmann/json.hpp>

#include <lockstep/base/error.h>

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
      // Of a tensor without elements one has to say that it is there.
      if (elements == 0 && piece.placement.logical_elements() > 0) continue;
      Shared& shared = all[{piece.tensor, piece.placement.text()}];
      shared.bytes = piece.bytes();
      shared.elements = elements;
      shared.holders.push_back({rank, i});
    }
  std::vector<Shared> pieces;
  pieces.reserve(all.size());
  for (auto& [key, shared] : all) pieces.push_back(std::move(shared));
  // The large ones first: what is left then evens out.
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
  // From another rank of the job, over an authenticated connection.
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

}  // namespace lockstep::checkpoint
