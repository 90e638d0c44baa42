#include <lockstep/recovery/peer_copies.h>

#include <algorithm>
#include <array>
#include <map>
#include <random>
#include <utility>

#include <ATen/ATen.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/checkpoint/held_tensors.h>
#include <lockstep/comm/open_groups.h>
#include <lockstep/recovery/load_together.h>
#include <lockstep/recovery/snapshot.h>

namespace lockstep {

// With the ranks of each host side by side in a circle, a turn by as many places as the largest
// host has ranks takes every rank of every host off it, as far as there are others.
std::vector<int> keepers(const std::vector<std::string>& host_of_rank) {
  std::map<std::string, std::vector<int>> by_host;
  for (std::size_t rank = 0; rank < host_of_rank.size(); ++rank)
    by_host[host_of_rank[rank]].push_back(static_cast<int>(rank));
  std::vector<std::vector<int>> hosts;
  hosts.reserve(by_host.size());
  for (auto& [host, ranks] : by_host) hosts.push_back(std::move(ranks));
  std::ranges::sort(hosts);
  std::vector<int> circle;
  std::size_t turn = 0;
  for (const std::vector<int>& ranks : hosts) {
    circle.insert(circle.end(), ranks.begin(), ranks.end());
    turn = std::max(turn, ranks.size());
  }
  if (hosts.size() == 1) turn = 1;
  std::vector<int> keeper(circle.size());
  for (std::size_t i = 0; i < circle.size(); ++i)
    keeper[static_cast<std::size_t>(circle[i])] = circle[(i + turn) % circle.size()];
  return keeper;
}

namespace {

using checkpoint::HeldPiece;
using nlohmann::json;

constexpr std::int64_t kLargestMessage = 1 << 30;  // engines count in 32 bits

// How long a copy may take to arrive once its ranks have parted: those that are left send theirs.
constexpr milliseconds kParting(1000);

std::string new_id(std::int64_t step) {
  std::random_device random;
  return fmt::format("{}-{:08x}{:08x}", step, random(), random());
}

std::vector<comm::Transfer> in_messages(comm::Transfer transfer) {
  std::vector<comm::Transfer> messages;
  const at::Tensor whole = transfer.tensor;
  for (std::int64_t at = 0; at < whole.numel(); at += kLargestMessage) {
    transfer.tensor = whole.narrow(0, at, std::min(kLargestMessage, whole.numel() - at));
    messages.push_back(transfer);
  }
  return messages;
}

}  // namespace

struct PeerCopies::State {
  std::string lost_together;
  std::array<Snapshot, 2> snapshots;
  std::uint64_t num_taken = 0;
  std::int64_t bytes_sent = 0;

  // The ranks that it was called with last.
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
    ranks.emplace(
        outer.group()->split(0, outer.rank(), "peer copies", comm::GroupTensors::on_host));
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
      comm::check_device_results();
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
    bytes_sent += bytes.numel();
    auto all = in_messages(comm::send_to(keeper, bytes));
    const auto receives = in_messages(comm::receive_from(kept_for, snapshot.received));
    all.insert(all.end(), receives.begin(), receives.end());
    sent = &snapshot;
    work = all.empty() ? comm::Work() : ranks->group()->exchange(std::move(all));
  }

  // The newest copy that is whole, of all that the ranks say they hold; the same on all of them.
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
    std::optional<SnapshotFilling> filling;
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

std::optional<checkpoint::TrainingState> PeerCopies::restore(
    DistributedManager& dist, const ModelRef& model, optim::Optimizer& optimizer,
    std::vector<mesh::HeldTensor> where_there) {
  // State that is not there must not count as written.
  const RankMessages ranks(dist.world());
  if (!newest_step(ranks)) return std::nullopt;
  return internal::load_state_of(dist, model, optimizer, std::move(where_there),
                                 [&](const auto& tensors, const LoadOptions& options) {
                                   auto restored = restore(ranks, tensors, options);
                                   LOCKSTEP_CHECK(restored, "the newest copy is gone");
                                   return *std::move(restored);
                                 });
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
