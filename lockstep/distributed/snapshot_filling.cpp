#include <lockstep/distributed/snapshot_filling.h>

#include <algorithm>
#include <cstring>

#include <lockstep/base/error.h>
#include <lockstep/checkpoint/format/reader.h>

namespace lockstep {

StoredPieces::StoredPieces(const Blocks& blocks) {
  for (std::size_t block = 0; block < blocks.size(); ++block) {
    std::int64_t offset = 0;
    for (const checkpoint::HeldPiece& piece : blocks[block]) {
      auto& record =
          tensors.try_emplace(piece.tensor, checkpoint::TensorRecord{piece.dtype, piece.shape, {}})
              .first->second;
      record.pieces.push_back({.file = {}, .placement = piece.placement});
      places[piece.tensor].push_back({static_cast<std::int64_t>(block), offset});
      offset += room_in_block(piece);
    }
  }
}

SnapshotFilling::SnapshotFilling(const StoredPieces& stored, const WholeCopy& copy,
                                 const std::vector<const mesh::HeldTensor*>& tensors, int rank,
                                 int num_ranks)
    : wanted_(static_cast<std::size_t>(num_ranks)), goals_(static_cast<std::size_t>(num_ranks)) {
  for (const mesh::HeldTensor* const tensor : tensors) {
    if (tensor->placement.empty()) continue;
    const checkpoint::TensorRecord& record = stored.tensors.at(tensor->name);
    const auto& places = stored.places.at(tensor->name);
    const auto element_bytes = static_cast<std::int64_t>(checkpoint::bits_of(record.dtype) / 8);
    std::vector<mesh::Placement> pieces;
    for (const checkpoint::Piece& piece : record.pieces) pieces.push_back(piece.placement);
    OneTensor& one = tensors_.emplace_back();
    one.tensor = tensor;
    for (const mesh::Read& read : checkpoint::plan_piece_reads(
             {tensor->name, record.shape}, std::move(pieces), tensor->placement, rank)) {
      const StoredPieces::Place& place = places[static_cast<std::size_t>(read.holder)];
      const BlockStretch stretch{place.block, place.offset + read.source_offset * element_bytes,
                                 read.count * element_bytes};
      const std::int64_t into = read.destination_offset * element_bytes;
      const auto& holders = copy.holders[static_cast<std::size_t>(place.block)];
      if (std::ranges::find(holders, rank) != holders.end()) {
        one.here.push_back({stretch, into});
        continue;
      }
      // Those who ask for a block ask different ones of its holders.
      const auto from = static_cast<std::size_t>(
          holders[static_cast<std::size_t>(rank + place.block) % holders.size()]);
      one.missing_bytes += stretch.bytes;
      wanted_[from].push_back(stretch);
      goals_[from].push_back({tensors_.size() - 1, into});
    }
  }
}

void SnapshotFilling::fill(const RankMessages& ranks, const Snapshot* snapshot) {
  for (OneTensor& one : tensors_)
    if (one.missing_bytes == 0) finish(one, snapshot);
  fetch_stretches(
      ranks, wanted_, [&](std::int64_t block) { return snapshot->block(block); },
      [&](int rank, std::size_t index, std::int64_t before, std::span<const std::byte> bytes) {
        const Goal& goal = goals_[static_cast<std::size_t>(rank)][index];
        OneTensor& one = tensors_[goal.tensor];
        put(one, goal.into + before, bytes);
        one.missing_bytes -= static_cast<std::int64_t>(bytes.size());
        if (one.missing_bytes == 0) finish(one, snapshot);
      });
}

void SnapshotFilling::put(OneTensor& one, std::int64_t into, std::span<const std::byte> bytes) {
  if (!one.bytes) one.bytes.emplace(*one.tensor);
  std::memcpy(one.bytes->span().data() + into, bytes.data(), bytes.size());
}

void SnapshotFilling::finish(OneTensor& one, const Snapshot* snapshot) {
  for (const Here& part : one.here)
    put(one, part.into,
        snapshot->block(part.stretch.block)
            .subspan(static_cast<std::size_t>(part.stretch.offset),
                     static_cast<std::size_t>(part.stretch.bytes)));
  one.bytes->finish();
  one.bytes.reset();
}

}  // namespace lockstep
