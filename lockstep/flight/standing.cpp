#include <lockstep/flight/standing.h>

#include <algorithm>
#include <tuple>

#include <lockstep/base/error.h>

namespace lockstep::flight {

namespace {

double seconds_between(std::int64_t from, std::int64_t to) {
  return to <= from ? 0 : (static_cast<double>(to) - static_cast<double>(from)) * 1e-9;
}

Position position_of(const Dump& dump) {
  Position position{.dump = &dump};
  for (const Entry& entry : dump.entries) {
    if (entry.sequence == 0) {
      if (entry.state != State::finished && position.transfer == nullptr)
        position.transfer = &entry;
      continue;
    }
    if (position.in_call) continue;
    position.call = &entry;
    position.sequence = entry.sequence;
    position.in_call = entry.state != State::finished;
  }
  if (!position.in_call && position.sequence < dump.last_sequence) {
    position.call = nullptr;
    position.sequence = dump.last_sequence;
  }
  return position;
}

}  // namespace

std::vector<int> Group::missing_from(std::uint64_t sequence) const {
  std::vector<int> missing;
  for (const int member : members) {
    const auto found = positions.find(member);
    if (found == positions.end() || found->second.sequence < sequence) missing.push_back(member);
  }
  std::sort(missing.begin(), missing.end());
  return missing;
}

bool Group::in_trouble() const {
  if (positions.size() < members.size()) return true;
  return std::any_of(positions.begin(), positions.end(), [&](const auto& each) {
    const Position& position = each.second;
    return position.in_call || position.transfer != nullptr || position.sequence != furthest;
  });
}

Standing standing_of(const std::vector<Dump>& dumps) {
  std::uint32_t newest = 0;
  for (const Dump& dump : dumps) newest = std::max(newest, dump.generation);

  using Key = std::tuple<std::string, std::vector<int>>;
  std::map<Key, Group> groups;
  for (const Dump& dump : dumps) {
    if (dump.generation != newest) continue;
    Group& group = groups[Key(dump.group, dump.members)];
    group.name = dump.group;
    group.generation = dump.generation;
    group.members = dump.members;
    // Of two dumps by one rank the later call counts; only a hand-made set has two.
    Position& mine = group.positions[dump.global_rank()];
    if (mine.dump == nullptr || mine.dump->last_sequence <= dump.last_sequence)
      mine = position_of(dump);
  }
  Standing standing;
  std::set<int> heard;
  for (auto& [key, group] : groups) {
    for (const auto& [rank, position] : group.positions) {
      group.furthest = std::max(group.furthest, position.sequence);
      heard.insert(rank);
    }
    standing.silent.insert(group.members.begin(), group.members.end());
    standing.groups.push_back(std::move(group));
  }
  for (const int rank : heard) standing.silent.erase(rank);
  return standing;
}

double seconds_of(const Entry& entry, const Dump& dump) {
  switch (entry.state) {
    case State::queued: return seconds_between(entry.queued_ns, dump.now_ns);
    case State::started: return seconds_between(entry.started_ns, dump.now_ns);
    case State::failed: return seconds_between(entry.queued_ns, entry.finished_ns);
    case State::finished: return seconds_between(entry.finished_ns, dump.now_ns);
  }
  return 0;
}

std::vector<int> peers_of(const Entry& entry, const Group& group) {
  std::vector<int> peers;
  for (const int peer : entry.peers)
    if (peer >= 0 && static_cast<std::size_t>(peer) < group.members.size())
      peers.push_back(group.members[static_cast<std::size_t>(peer)]);
  std::sort(peers.begin(), peers.end());
  return peers;
}

std::string short_name(const Entry& entry, const Group& group) {
  if (entry.sequence != 0) return fmt::format("{} #{}", entry.operation, entry.sequence);
  const std::vector<int> peers = peers_of(entry, group);
  if (peers.empty()) return entry.operation;
  return fmt::format("{} with {}", entry.operation, list_ranks(peers));
}

}  // namespace lockstep::flight
