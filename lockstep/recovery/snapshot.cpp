#include <lockstep/recovery/snapshot.h>

#include <algorithm>
#include <cstring>

#include <ATen/ATen.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/error.h>
#include <lockstep/checkpoint/format/reader.h>

namespace lockstep {

std::int64_t room_in_block(const checkpoint::HeldPiece& piece) {
  return checkpoint::HostCopy::room_for(static_cast<std::int64_t>(piece.bytes()));
}

std::int64_t block_bytes(const std::vector<checkpoint::HeldPiece>& pieces) {
  std::int64_t bytes = 0;
  for (const checkpoint::HeldPiece& piece : pieces) bytes += room_in_block(piece);
  return bytes;
}

void Snapshot::clear() {
  own_block.reset();
  received_block.reset();
  order = 0;
  if (!is_abandoned) return;
  own = checkpoint::HostCopy();
  received = at::Tensor();
  is_abandoned = false;
}

std::vector<int> Snapshot::held_blocks() const {
  std::vector<int> held;
  if (own_block) held.push_back(*own_block);
  if (received_block && received_block != own_block) held.push_back(*received_block);
  return held;
}

std::span<const std::byte> Snapshot::block(std::int64_t number) const {
  const at::Tensor bytes = number == own_block ? own.bytes() : received;
  LOCKSTEP_CHECK(number == own_block || number == received_block, "block {} is not here", number);
  return {static_cast<const std::byte*>(bytes.data_ptr()), static_cast<std::size_t>(bytes.numel())};
}

std::string to_text(const Snapshot& snapshot) {
  auto blocks = nlohmann::json::array();
  for (const auto& pieces : *snapshot.blocks) blocks.push_back(checkpoint::to_text(pieces));
  return nlohmann::json{{"state", snapshot.state}, {"blocks", std::move(blocks)}}.dump();
}

namespace {

constexpr std::int64_t kLeastAtOnce = 1 << 16;

std::int64_t total_bytes(const std::vector<BlockStretch>& stretches) {
  std::int64_t total = 0;
  for (const BlockStretch& stretch : stretches) total += stretch.bytes;
  return total;
}

// Walks through stretches as through one row of bytes, some at a time.
class Walk {
 public:
  explicit Walk(const std::vector<BlockStretch>& stretches)
      : stretches_(&stretches), left_(total_bytes(stretches)) {}

  std::int64_t left() const { return left_; }

  // Calls visit(index, before, bytes, at) for what the next bytes are of: of which stretch, from
  // where on, how many, and how many of these went before.
  template <typename Visit>
  void next(std::int64_t bytes, const Visit& visit) {
    for (std::int64_t at = 0; at < bytes;) {
      const std::int64_t rest = (*stretches_)[index_].bytes - before_;
      const std::int64_t count = std::min(rest, bytes - at);
      if (count > 0) visit(index_, before_, count, at);
      at += count;
      before_ += count;
      left_ -= count;
      if (before_ == (*stretches_)[index_].bytes) {
        ++index_;
        before_ = 0;
      }
    }
  }

 private:
  const std::vector<BlockStretch>* stretches_;
  std::int64_t left_;
  std::size_t index_ = 0;
  std::int64_t before_ = 0;
};

std::vector<std::vector<BlockStretch>> tell_wishes(
    const RankMessages& ranks, const std::vector<std::vector<BlockStretch>>& wanted) {
  std::vector<std::vector<std::int64_t>> numbers;
  for (const std::vector<BlockStretch>& of_rank : wanted) {
    std::vector<std::int64_t>& list = numbers.emplace_back();
    for (const BlockStretch& one : of_rank)
      list.insert(list.end(), {one.block, one.offset, one.bytes});
  }
  std::vector<std::vector<BlockStretch>> asked;
  for (const std::vector<std::int64_t>& list : ranks.deal(numbers)) {
    std::vector<BlockStretch>& of_rank = asked.emplace_back();
    for (std::size_t i = 0; i + 2 < list.size(); i += 3)
      of_rank.push_back({list[i], list[i + 1], list[i + 2]});
  }
  return asked;
}

// The same on all ranks: what two of them send at once is for both to know.
std::int64_t bytes_of_one_message(const RankMessages& ranks,
                                  const std::vector<std::vector<BlockStretch>>& wanted,
                                  const std::vector<std::vector<BlockStretch>>& asked,
                                  std::int64_t bytes_at_once) {
  const auto busy = [](const std::vector<BlockStretch>& stretches) {
    return total_bytes(stretches) > 0;
  };
  const auto mine =
      std::max(std::ranges::count_if(wanted, busy), std::ranges::count_if(asked, busy));
  std::int64_t most = 1;
  for (const std::string& text : ranks.gather(std::to_string(mine)))
    most = std::max<std::int64_t>(most, std::stoll(text));
  return std::max(kLeastAtOnce, bytes_at_once / most);
}

}  // namespace

void fetch_stretches(const RankMessages& ranks,
                     const std::vector<std::vector<BlockStretch>>& wanted,
                     const std::function<std::span<const std::byte>(std::int64_t block)>& held,
                     const std::function<void(int rank, std::size_t index, std::int64_t before,
                                              std::span<const std::byte> bytes)>& take,
                     const FetchOptions& options) {
  const auto asked = tell_wishes(ranks, wanted);
  const std::int64_t message = bytes_of_one_message(ranks, wanted, asked, options.bytes_at_once);
  std::vector<Walk> sends(asked.begin(), asked.end());
  std::vector<Walk> receives(wanted.begin(), wanted.end());
  while (true) {
    // Message k between two ranks is in round k of both, so that nobody waits in a circle.
    std::vector<comm::Transfer> transfers;
    for (int rank = 0; rank < ranks.size(); ++rank) {
      Walk& walk = sends[static_cast<std::size_t>(rank)];
      const std::int64_t bytes = std::min(message, walk.left());
      if (bytes == 0) continue;
      const at::Tensor packed = at::empty({bytes}, at::kByte);
      auto* const to = static_cast<std::byte*>(packed.data_ptr());
      walk.next(bytes, [&](std::size_t index, std::int64_t before, std::int64_t count,
                           std::int64_t at) {
        const BlockStretch& one = asked[static_cast<std::size_t>(rank)][index];
        const auto block = held(one.block);
        LOCKSTEP_CHECK(one.offset >= 0 && one.bytes >= 0 &&
                           one.offset + one.bytes <= static_cast<std::int64_t>(block.size()),
                       "rank {} asks for bytes {} to {} of {}", rank, one.offset,
                       one.offset + one.bytes, block.size());
        std::memcpy(to + at, block.data() + one.offset + before, static_cast<std::size_t>(count));
      });
      transfers.push_back(comm::send_to(rank, packed));
    }
    std::vector<std::pair<int, at::Tensor>> coming;
    for (int rank = 0; rank < ranks.size(); ++rank) {
      const std::int64_t bytes = std::min(message, receives[static_cast<std::size_t>(rank)].left());
      if (bytes == 0) continue;
      coming.emplace_back(rank, at::empty({bytes}, at::kByte));
      transfers.push_back(comm::receive_from(rank, coming.back().second));
    }
    if (transfers.empty()) return;
    ranks.exchange(transfers);
    for (const auto& [rank, packed] : coming) {
      const auto* const from = static_cast<const std::byte*>(packed.data_ptr());
      const int source = rank;
      receives[static_cast<std::size_t>(rank)].next(
          packed.numel(),
          [&](std::size_t index, std::int64_t before, std::int64_t count, std::int64_t at) {
            take(source, index, before, {from + at, static_cast<std::size_t>(count)});
          });
    }
  }
}

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
      // Ranks that ask for a block ask different ones of its holders.
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
