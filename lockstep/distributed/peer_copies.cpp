#include <lockstep/distributed/peer_copies.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <random>
#include <utility>

#include <ATen/ATen.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/error.h>
#include <lockstep/base/host_identity.h>
#include <lockstep/checkpoint/host_copy.h>
#include <lockstep/checkpoint/piece_reads.h>
#include <lockstep/distributed/fetch_stretches.h>
#include <lockstep/distributed/neighbours.h>

namespace lockstep {

namespace {

using checkpoint::HeldPiece;
using checkpoint::HostCopy;
using nlohmann::json;

// What a message may be: engines count in 32 bits, and a device stages it.
constexpr std::int64_t kLargestMessage = 1 << 30;
constexpr std::int64_t kStagedMessage = 64 << 20;

// How long a copy may take to arrive once its ranks have parted: those that are left send theirs.
constexpr milliseconds kParting(1000);

// What each rank of a job copies: a block of bytes, piece after piece.
using Blocks = std::vector<std::vector<HeldPiece>>;

std::int64_t room_in_block(const HeldPiece& piece) {
  return HostCopy::room_for(static_cast<std::int64_t>(piece.bytes()));
}

std::int64_t block_bytes(const std::vector<HeldPiece>& pieces) {
  std::int64_t bytes = 0;
  for (const HeldPiece& piece : pieces) bytes += room_in_block(piece);
  return bytes;
}

// One copy of the job's state, as far as this process has it.
struct Snapshot {
  std::int64_t step = 0;
  std::string id;     // of this copy: one of the same step, of ranks formed anew, is another
  std::string state;  // a checkpoint::TrainingState
  std::shared_ptr<const Blocks> blocks;
  std::uint64_t order = 0;  // of the copies of this process; 0: holds nothing

  HostCopy own;
  std::optional<int> own_block;
  at::Tensor received;
  std::optional<int> received_block;
  // Something may still read or write the memory.
  bool is_abandoned = false;

  void clear() {
    own_block.reset();
    received_block.reset();
    order = 0;
    if (!is_abandoned) return;
    own = HostCopy();
    received = at::Tensor();
    is_abandoned = false;
  }

  std::vector<int> held_blocks() const {
    std::vector<int> held;
    if (own_block) held.push_back(*own_block);
    if (received_block && received_block != own_block) held.push_back(*received_block);
    return held;
  }

  std::span<const std::byte> block(std::int64_t number) const {
    const at::Tensor bytes = number == own_block ? own.bytes() : received;
    LOCKSTEP_CHECK(number == own_block || number == received_block, "block {} is not here", number);
    return {static_cast<const std::byte*>(bytes.data_ptr()),
            static_cast<std::size_t>(bytes.numel())};
  }
};

// A copy of which the ranks together hold every block.
struct WholeCopy {
  std::int64_t step = 0;
  std::string id;
  std::vector<std::vector<int>> holders;  // of each block
};

std::string to_text(const Snapshot& snapshot) {
  json blocks = json::array();
  for (const auto& pieces : *snapshot.blocks) blocks.push_back(checkpoint::to_text(pieces));
  return json{{"state", snapshot.state}, {"blocks", std::move(blocks)}}.dump();
}

std::string new_id(std::int64_t step) {
  std::random_device random;
  return fmt::format("{}-{:08x}{:08x}", step, random(), random());
}

std::vector<comm::Transfer> in_messages(comm::Transfer transfer, std::int64_t largest) {
  std::vector<comm::Transfer> messages;
  const at::Tensor whole = transfer.tensor;
  for (std::int64_t at = 0; at < whole.numel(); at += largest) {
    transfer.tensor = whole.narrow(0, at, std::min(largest, whole.numel() - at));
    messages.push_back(transfer);
  }
  return messages;
}

// Where the pieces of a copy's tensors are.
struct StoredPieces {
  struct Place {
    std::int64_t block = 0;
    std::int64_t offset = 0;
  };
  checkpoint::StoredTensors tensors;
  std::map<std::string, std::vector<Place>> places;

  explicit StoredPieces(const Blocks& blocks) {
    for (std::size_t block = 0; block < blocks.size(); ++block) {
      std::int64_t offset = 0;
      for (const HeldPiece& piece : blocks[block]) {
        auto& record =
            tensors
                .try_emplace(piece.tensor, checkpoint::TensorRecord{piece.dtype, piece.shape, {}})
                .first->second;
        record.pieces.push_back({.file = {}, .placement = piece.placement});
        places[piece.tensor].push_back({static_cast<std::int64_t>(block), offset});
        offset += room_in_block(piece);
      }
    }
  }
};

// Fills one rank's tensors from the blocks of a copy: what it holds of them, and what others send.
class Filling {
 public:
  // UsageError where they cannot be filled; nothing is touched yet.
  Filling(const StoredPieces& stored, const WholeCopy& copy,
          std::vector<const mesh::HeldTensor*> tensors, int rank, int num_ranks)
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

  void fill(const RankMessages& ranks, const Snapshot* snapshot) {
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

 private:
  struct Here {
    BlockStretch stretch;
    std::int64_t into = 0;
  };
  struct OneTensor {
    const mesh::HeldTensor* tensor = nullptr;
    std::vector<Here> here;
    std::int64_t missing_bytes = 0;
    // Only from its first byte to its last: where it takes memory, few tensors do at once.
    std::optional<checkpoint::HeldBytes> bytes;
  };
  struct Goal {
    std::size_t tensor = 0;
    std::int64_t into = 0;
  };

  static void put(OneTensor& one, std::int64_t into, std::span<const std::byte> bytes) {
    if (!one.bytes) one.bytes.emplace(*one.tensor);
    std::memcpy(one.bytes->span().data() + into, bytes.data(), bytes.size());
  }

  static void finish(OneTensor& one, const Snapshot* snapshot) {
    for (const Here& part : one.here)
      put(one, part.into,
          snapshot->block(part.stretch.block)
              .subspan(static_cast<std::size_t>(part.stretch.offset),
                       static_cast<std::size_t>(part.stretch.bytes)));
    one.bytes->finish();
    one.bytes.reset();
  }

  std::vector<OneTensor> tensors_;
  std::vector<std::vector<BlockStretch>> wanted_;  // of each rank
  std::vector<std::vector<Goal>> goals_;           // of each of those
};

}  // namespace

struct PeerCopies::State {
  std::string lost_together;
  std::array<Snapshot, 2> snapshots;
  std::uint64_t num_taken = 0;
  std::int64_t bytes_sent = 0;

  // Of the ranks that it was called with last.
  std::weak_ptr<comm::Communicator> called_with;
  std::optional<RankMessages> ranks;
  int keeper = 0;                            // who has this rank's copy
  int kept_for = 0;                          // whose copy this rank has
  std::vector<HeldPiece> shared;             // this rank's
  std::vector<std::string> texts_of_shared;  // every rank's
  std::vector<checkpoint::WrittenPart> written;
  std::shared_ptr<const Blocks> blocks;

  // On its way.
  std::optional<comm::Work> work;
  Snapshot* sent = nullptr;

  // Whether the ranks are new ones.
  bool enter(const RankMessages& outer) {
    if (ranks && called_with.lock() == outer.group()) return false;
    leave();
    ranks.emplace(outer.group()->split(0, outer.rank(), "peer copies"), outer.device());
    called_with = outer.group();
    const auto hosts = ranks->gather(lost_together);
    const std::vector<int> keeper_of = keepers(hosts);
    keeper = keeper_of[static_cast<std::size_t>(ranks->rank())];
    kept_for = static_cast<int>(std::ranges::find(keeper_of, ranks->rank()) - keeper_of.begin());
    return true;
  }

  void leave() {
    if (!ranks) return;
    try {
      finish(Deadline::after(kParting));
    } catch (const std::exception&) {
      // That a neighbour is lost is why the job is formed anew.
      ranks->group()->abort("this rank has left the group");
    }
    ranks.reset();
    called_with.reset();
    shared.clear();
    texts_of_shared.clear();
    written.clear();
    blocks.reset();
  }

  void finish(Deadline deadline) {
    if (!work) return;
    comm::Work waited_for = *std::exchange(work, std::nullopt);
    Snapshot& snapshot = *std::exchange(sent, nullptr);
    try {
      waited_for.wait_on_host(deadline);
    } catch (...) {
      snapshot.is_abandoned = true;
      throw;
    }
    snapshot.received_block = kept_for;
  }

  void forget() {
    LOCKSTEP_CHECK(!work, "a copy is on its way");
    for (Snapshot& snapshot : snapshots) snapshot.clear();
  }

  // One gathering: that all ranks have the copy before, and what each has now.
  void share_out(const std::vector<mesh::HeldTensor>& tensors) {
    std::vector<HeldPiece> pieces;
    const std::vector<std::string> said = say_together(*ranks, [&] {
      pieces = checkpoint::held_pieces(tensors);
      return blocks != nullptr && pieces == shared ? std::string() : checkpoint::to_text(pieces);
    });
    const bool any_new = std::ranges::any_of(said, [](const auto& one) { return !one.empty(); });
    if (!any_new) return;
    texts_of_shared.resize(said.size());
    Blocks held;
    for (std::size_t rank = 0; rank < said.size(); ++rank) {
      if (!said[rank].empty()) texts_of_shared[rank] = said[rank];
      held.push_back(checkpoint::parse_held_pieces(texts_of_shared[rank]));
    }
    const auto shares = checkpoint::share_out(held);
    Blocks copied;
    for (std::size_t rank = 0; rank < held.size(); ++rank)
      copied.push_back(checkpoint::written_pieces(held[rank], shares[rank]));
    written = shares[static_cast<std::size_t>(ranks->rank())];
    shared = std::move(pieces);
    blocks = std::make_shared<const Blocks>(std::move(copied));
  }

  Snapshot& older() {
    return snapshots[0].order <= snapshots[1].order ? snapshots[0] : snapshots[1];
  }

  void take(const CheckpointContents& contents) {
    share_out(contents.tensors);
    Snapshot& snapshot = older();
    snapshot.clear();
    snapshot.blocks = blocks;
    const std::int64_t kept_bytes =
        ranks->size() == 1 ? 0 : block_bytes((*blocks)[static_cast<std::size_t>(kept_for)]);
    const std::vector<std::string> said = say_together(*ranks, [&] {
      snapshot.own.take(contents.tensors, written);
      if (!snapshot.received.defined() || snapshot.received.numel() != kept_bytes)
        snapshot.received = at::empty({kept_bytes}, at::kByte);
      if (!ranks->is_first()) return std::string();
      return json{{"step", contents.state.step},
                  {"id", new_id(contents.state.step)},
                  {"state", checkpoint::to_text(contents.state)}}
          .dump();
    });
    const json first = json::parse(said.front());
    snapshot.step = first.at("step").get<std::int64_t>();
    snapshot.id = first.at("id").get<std::string>();
    snapshot.state = first.at("state").get<std::string>();
    snapshot.order = ++num_taken;
    snapshot.own_block = ranks->rank();
    send(snapshot);
  }

  void send(Snapshot& snapshot) {
    if (ranks->size() == 1) return;
    const at::Tensor bytes = snapshot.own.bytes();
    const auto transfers = [&](std::int64_t largest) {
      return std::pair(in_messages(comm::send_to(keeper, bytes), largest),
                       in_messages(comm::receive_from(kept_for, snapshot.received), largest));
    };
    bytes_sent += bytes.numel();
    if (ranks->travels_from_host()) {
      auto [all, receives] = transfers(kLargestMessage);
      all.insert(all.end(), receives.begin(), receives.end());
      sent = &snapshot;
      work = all.empty() ? comm::Work() : ranks->group()->exchange(std::move(all));
      return;
    }
    const auto [sends, receives] = transfers(kStagedMessage);
    for (std::size_t i = 0; i < std::max(sends.size(), receives.size()); ++i) {
      std::vector<comm::Transfer> now;
      if (i < sends.size()) now.push_back(sends[i]);
      if (i < receives.size()) now.push_back(receives[i]);
      ranks->exchange(now);
    }
    snapshot.received_block = kept_for;
  }

  // What the ranks say they hold, and of it the newest that is whole; the same on all of them.
  std::optional<WholeCopy> newest_whole() {
    json mine = json::array();
    for (const Snapshot& snapshot : snapshots)
      if (snapshot.order > 0)
        mine.push_back({{"step", snapshot.step},
                        {"id", snapshot.id},
                        {"blocks", snapshot.blocks->size()},
                        {"held", snapshot.held_blocks()}});
    std::map<std::pair<std::int64_t, std::string>, WholeCopy> copies;
    const std::vector<std::string> all = ranks->gather(mine.dump());
    for (std::size_t rank = 0; rank < all.size(); ++rank)
      for (const json& one : json::parse(all[rank])) {
        const auto step = one.at("step").get<std::int64_t>();
        const auto id = one.at("id").get<std::string>();
        WholeCopy& copy = copies[{step, id}];
        copy.step = step;
        copy.id = id;
        copy.holders.resize(one.at("blocks").get<std::size_t>());
        for (const json& block : one.at("held"))
          copy.holders.at(block.get<std::size_t>()).push_back(static_cast<int>(rank));
      }
    for (auto copy = copies.rbegin(); copy != copies.rend(); ++copy)
      if (std::ranges::none_of(copy->second.holders,
                               [](const std::vector<int>& holders) { return holders.empty(); }))
        return copy->second;
    return std::nullopt;
  }

  std::optional<checkpoint::TrainingState> restore(const std::vector<mesh::HeldTensor>& tensors,
                                                   const LoadOptions& options) {
    const auto copy = newest_whole();
    if (!copy) {
      forget();
      return std::nullopt;
    }
    const auto found = std::ranges::find_if(snapshots, [&](const Snapshot& snapshot) {
      return snapshot.order > 0 && snapshot.id == copy->id;
    });
    Snapshot* const mine = found == snapshots.end() ? nullptr : &*found;
    // Ranks that come new know nothing of it.
    const int teller = copy->holders.front().front();
    const std::string told = ranks->gather(
        ranks->rank() == teller ? to_text(*mine) : std::string())[static_cast<std::size_t>(teller)];
    const json description = json::parse(told);
    Blocks all;
    for (const json& block : description.at("blocks"))
      all.push_back(checkpoint::parse_held_pieces(block.get<std::string>()));
    const StoredPieces stored(all);
    check_fit_together(*ranks, fmt::format("the copy of step {} in the ranks' memory", copy->step),
                       stored.tensors, tensors, options);
    std::vector<const mesh::HeldTensor*> filled;
    for (const mesh::HeldTensor& one : tensors) filled.push_back(&one);
    for (const mesh::HeldTensor& one : options.where_there)
      if (checkpoint::fit_fault(stored.tensors, {&one, 1}).empty()) filled.push_back(&one);
    std::optional<Filling> filling;
    do_together(*ranks, [&] {
      filling.emplace(stored, *copy, std::move(filled), ranks->rank(), ranks->size());
    });
    filling->fill(*ranks, mine);
    for (Snapshot& snapshot : snapshots)
      if (&snapshot != mine) snapshot.clear();
    return checkpoint::parse_state(description.at("state").get<std::string>(),
                                   "a copy in the ranks' memory");
  }
};

PeerCopies::PeerCopies(PeerCopiesOptions options) : state_(std::make_unique<State>()) {
  state_->lost_together =
      options.lost_together.empty() ? host_identity() : std::move(options.lost_together);
}

PeerCopies::~PeerCopies() { leave(); }

void PeerCopies::take(const RankMessages& ranks, const CheckpointContents& contents) {
  if (state_->enter(ranks)) state_->forget();
  finish();
  state_->take(contents);
}

void PeerCopies::finish() { state_->finish(Deadline::never()); }

std::optional<std::int64_t> PeerCopies::newest_step(const RankMessages& ranks) {
  state_->enter(ranks);
  finish();
  const auto copy = state_->newest_whole();
  return copy ? std::optional(copy->step) : std::nullopt;
}

std::optional<checkpoint::TrainingState> PeerCopies::restore(
    const RankMessages& ranks, const std::vector<mesh::HeldTensor>& tensors,
    const LoadOptions& options) {
  state_->enter(ranks);
  finish();
  return state_->restore(tensors, options);
}

void PeerCopies::forget() {
  finish();
  state_->forget();
}

void PeerCopies::leave() { state_->leave(); }

std::int64_t PeerCopies::bytes_held() const {
  std::int64_t bytes = 0;
  for (const Snapshot& snapshot : state_->snapshots)
    bytes +=
        snapshot.own.memory_bytes() + (snapshot.received.defined() ? snapshot.received.numel() : 0);
  return bytes;
}

std::int64_t PeerCopies::bytes_sent() const { return state_->bytes_sent; }

}  // namespace lockstep
