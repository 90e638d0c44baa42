#include <lockstep/flight/diagnosis.h>

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <set>
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
    // Where a rank has two dumps, as only a hand-made set has, the one with the later call counts.
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

namespace {

// A rank that came this much later than another was not just slower to start.
constexpr double kLateSeconds = 0.5;

// Whether a call has ended in an error; the dump may have been written just before.
bool gave_up(const Entry& call, const Dump& dump) {
  return call.state == State::failed ||
         (call.state != State::finished && !dump.cause.fault.empty());
}

// Finds the first call that ranks made differently; later differences follow from it.
std::optional<Finding> find_mismatch(const Group& group) {
  std::map<std::uint64_t, std::map<std::string, Finding::Variant>> calls;
  for (const auto& [rank, position] : group.positions) {
    for (const Entry& entry : position.dump->entries) {
      if (entry.sequence == 0) continue;
      Finding::Variant& variant = calls[entry.sequence][entry.summary];
      if (variant.call == nullptr) variant.call = &entry;
      variant.ranks.push_back(rank);
    }
  }
  for (const auto& [sequence, variants] : calls) {
    if (variants.size() < 2) continue;
    Finding finding{.kind = Finding::Kind::mismatch, .group = &group};
    for (const auto& [summary, variant] : variants) finding.variants.push_back(variant);
    // The few who differ come first; they are the more likely culprits.
    std::stable_sort(finding.variants.begin(), finding.variants.end(),
                     [](const auto& a, const auto& b) { return a.ranks.size() < b.ranks.size(); });
    finding.ranks = finding.variants.front().ranks;
    finding.call = finding.variants.front().call;
    return finding;
  }
  return std::nullopt;
}

// Finds ranks that came to a call only after the others had given up on it; all failed in it.
std::optional<Finding> find_late(const Group& group) {
  if (!group.missing_from(group.furthest).empty()) return std::nullopt;
  std::map<int, double> seconds;
  double longest = 0;
  const Entry* call = nullptr;
  for (const auto& [rank, position] : group.positions) {
    if (position.call == nullptr || position.call->state != State::failed) continue;
    seconds[rank] = seconds_of(*position.call, *position.dump);
    if (seconds[rank] >= longest) call = position.call;
    longest = std::max(longest, seconds[rank]);
  }
  Finding finding{.kind = Finding::Kind::came_late, .group = &group, .call = call};
  finding.given_up = true;
  double least = longest;
  for (const auto& [rank, span] : seconds) {
    if (longest - span < kLateSeconds || span > longest / 2) {
      finding.waiting.push_back(rank);
    } else {
      finding.ranks.push_back(rank);
      least = std::min(least, longest - span);
    }
  }
  if (finding.ranks.empty()) return std::nullopt;
  finding.seconds = least;
  return finding;
}

class Search {
 public:
  explicit Search(const Standing& standing) : standing_(standing) {}

  std::vector<Finding> run() {
    for (const Group& group : standing_.groups) {
      if (auto mismatch = find_mismatch(group)) {
        explain(group);
        findings_.push_back(std::move(*mismatch));
      } else if (auto late = find_late(group)) {
        explain(group);
        findings_.push_back(std::move(*late));
      } else {
        collect(group);
      }
    }
    find_ends();
    find_circles();
    if (findings_.empty()) find_all_there();
    std::stable_sort(findings_.begin(), findings_.end(), [](const Finding& a, const Finding& b) {
      const auto order = [](const Finding& each) {
        return std::tuple(each.kind != Finding::Kind::mismatch,
                          -static_cast<std::int64_t>(each.waiting.size()));
      };
      return order(a) < order(b);
    });
    return std::move(findings_);
  }

 private:
  // Marks the ranks in a call of this group as explained: the finding says why they wait.
  void explain(const Group& group) {
    for (const auto& [rank, position] : group.positions)
      if (position.in_call) explained_.insert(rank);
  }

  void collect(const Group& group) {
    std::map<std::uint64_t, std::vector<int>> missing;  // by sequence
    for (const auto& [rank, position] : group.positions) {
      Wait wait{.rank = rank, .group = &group, .dump = position.dump};
      if (position.in_call) {
        auto [found, is_new] = missing.try_emplace(position.sequence);
        if (is_new) found->second = group.missing_from(position.sequence);
        wait.call = position.call;
        wait.for_ranks = found->second;
        waits_[rank].push_back(wait);
      }
      if (position.transfer != nullptr && !position.transfer->peers.empty()) {
        wait.call = position.transfer;
        wait.for_ranks = missing_peers(group, position);
        waits_[rank].push_back(std::move(wait));
      }
    }
    for (const auto& [rank, waits] : waits_)
      for (const Wait& wait : waits)
        if (wait.group == &group)
          for (const int other : wait.for_ranks) waiters_[other].insert(rank);
  }

  // Peers of a transfer that are in none with this rank.
  static std::vector<int> missing_peers(const Group& group, const Position& position) {
    std::vector<int> missing;
    for (const int peer : position.transfer->peers) {
      if (static_cast<std::size_t>(peer) >= group.members.size()) continue;
      const int rank = group.members[static_cast<std::size_t>(peer)];
      const auto found = group.positions.find(rank);
      if (found != group.positions.end() && found->second.transfer != nullptr) {
        const auto& theirs = found->second.transfer->peers;
        if (std::find(theirs.begin(), theirs.end(), position.dump->rank) != theirs.end()) continue;
      }
      missing.push_back(rank);
    }
    std::sort(missing.begin(), missing.end());
    return missing;
  }

  bool waits(int rank) const {
    const auto found = waits_.find(rank);
    return found != waits_.end() &&
           std::any_of(found->second.begin(), found->second.end(),
                       [](const Wait& wait) { return !wait.for_ranks.empty(); });
  }

  bool told_lost(int rank) const {
    for (const Group& group : standing_.groups)
      for (const auto& [other, position] : group.positions) {
        const Cause& cause = position.dump->cause;
        if (cause.fault == fault_name(Fault::peer_lost) &&
            std::find(cause.at_fault.begin(), cause.at_fault.end(), rank) != cause.at_fault.end())
          return true;
      }
    return false;
  }

  // A wait for a rank, the one that has lasted longest; in a call with a number, if there is one:
  // that one it must make, too.
  const Wait* longest_wait_for(int rank) const {
    const Wait* longest = nullptr;
    std::pair<bool, double> most{false, -1};
    for (const int waiter : waiters_.at(rank)) {
      for (const Wait& wait : waits_.at(waiter)) {
        if (!std::binary_search(wait.for_ranks.begin(), wait.for_ranks.end(), rank)) continue;
        const std::pair own{wait.call->sequence != 0, seconds_of(*wait.call, *wait.dump)};
        if (own <= most) continue;
        most = own;
        longest = &wait;
      }
    }
    return longest;
  }

  // Finds where waiting ends: ranks that others wait for and that wait for nobody.
  void find_ends() {
    using Key = std::tuple<Finding::Kind, const Group*, std::uint64_t>;
    std::map<Key, Finding> ends;
    for (const auto& [rank, waiters] : waiters_) {
      if (waits(rank) || explained_.contains(rank)) continue;
      const Wait* wait = longest_wait_for(rank);
      Finding::Kind kind = Finding::Kind::never_called;
      if (standing_.silent.contains(rank)) {
        kind = told_lost(rank) ? Finding::Kind::lost : Finding::Kind::silent;
      } else if (const auto own = waits_.find(rank); own != waits_.end()) {
        kind = Finding::Kind::all_there;  // in a call of its own that everyone has come to
        wait = &own->second.front();
      }
      Finding& finding = ends[Key(kind, wait->group, wait->call->sequence)];
      finding.kind = kind;
      finding.ranks.push_back(rank);
      finding.group = wait->group;
      finding.call = wait->call;
      finding.waiter = wait->rank;
    }
    for (auto& [key, finding] : ends) {
      follow(finding);
      findings_.push_back(std::move(finding));
    }
  }

  // Finds the ranks that wait for a finding's ranks, and the longest chain of waits to them.
  void follow(Finding& finding) {
    std::map<int, int> next;  // towards the finding's ranks
    std::deque<int> queue(finding.ranks.begin(), finding.ranks.end());
    for (const int rank : finding.ranks) next[rank] = rank;
    int furthest = finding.ranks.front();
    while (!queue.empty()) {
      const int rank = queue.front();
      queue.pop_front();
      furthest = rank;
      const auto waiters = waiters_.find(rank);
      if (waiters == waiters_.end()) continue;
      for (const int waiter : waiters->second) {
        if (!next.try_emplace(waiter, rank).second) continue;
        queue.push_back(waiter);
        finding.waiting.push_back(waiter);
      }
    }
    std::sort(finding.waiting.begin(), finding.waiting.end());
    for (const int waiter : finding.waiting) reached_.insert(waiter);
    for (const int waiter : finding.waiting)
      for (const Wait& wait : waits_.at(waiter)) {
        finding.seconds = std::max(finding.seconds, seconds_of(*wait.call, *wait.dump));
        finding.given_up = finding.given_up || gave_up(*wait.call, *wait.dump);
      }
    for (int rank = furthest; next[rank] != rank; rank = next[rank])
      finding.chain.push_back(*wait_of(rank, next[rank]));
  }

  const Wait* wait_of(int rank, int other) const {
    for (const Wait& wait : waits_.at(rank))
      if (std::binary_search(wait.for_ranks.begin(), wait.for_ranks.end(), other)) return &wait;
    return nullptr;
  }

  // Ranks that wait, and whose waiting ends nowhere.
  void find_circles() {
    for (const auto& [start, unused] : waits_) {
      if (!waits(start) || reached_.contains(start) || explained_.contains(start)) continue;
      // Each of them waits for one that has no end either, so walking on must come back.
      std::vector<Wait> way;
      std::map<int, std::size_t> at;
      int rank = start;
      bool ends = false;
      while (!at.contains(rank) && !ends) {
        at[rank] = way.size();
        const auto waits = waits_.find(rank);
        ends = true;
        if (waits == waits_.end() || explained_.contains(rank)) break;
        for (const Wait& wait : waits->second) {
          if (wait.for_ranks.empty()) continue;
          way.push_back(wait);
          rank = wait.for_ranks.front();
          way.back().for_ranks = {rank};
          ends = false;
          break;
        }
      }
      if (ends) continue;  // leads to ranks whose call is explained already
      Finding finding{.kind = Finding::Kind::circle};
      finding.chain.assign(way.begin() + static_cast<std::ptrdiff_t>(at[rank]), way.end());
      for (const Wait& wait : finding.chain) {
        finding.ranks.push_back(wait.rank);
        finding.seconds = std::max(finding.seconds, seconds_of(*wait.call, *wait.dump));
        finding.given_up = finding.given_up || gave_up(*wait.call, *wait.dump);
      }
      std::sort(finding.ranks.begin(), finding.ranks.end());
      finding.group = finding.chain.front().group;
      finding.call = finding.chain.front().call;
      follow(finding);
      finding.chain.assign(way.begin() + static_cast<std::ptrdiff_t>(at[rank]), way.end());
      for (const Wait& wait : way) reached_.insert(wait.rank);
      findings_.push_back(std::move(finding));
    }
  }

  void find_all_there() {
    for (const Group& group : standing_.groups) {
      Finding finding{.kind = Finding::Kind::all_there, .group = &group};
      for (const auto& [rank, position] : group.positions) {
        const Entry* call = position.in_call ? position.call : position.transfer;
        if (call == nullptr) continue;
        finding.ranks.push_back(rank);
        finding.seconds = std::max(finding.seconds, seconds_of(*call, *position.dump));
        finding.given_up = finding.given_up || gave_up(*call, *position.dump);
        if (finding.call == nullptr) finding.call = call;
      }
      finding.waiting = finding.ranks;
      if (finding.call != nullptr) findings_.push_back(std::move(finding));
    }
  }

  const Standing& standing_;
  std::map<int, std::vector<Wait>> waits_;  // by the rank that waits
  std::map<int, std::set<int>> waiters_;    // by the rank that they wait for
  std::set<int> explained_;                 // in a call that a finding says all of
  std::set<int> reached_;                   // wait for a finding's ranks
  std::vector<Finding> findings_;
};

}  // namespace

std::vector<Finding> diagnose(const Standing& standing) { return Search(standing).run(); }

Longest longest_wait(const Standing& standing) {
  Longest longest;
  for (const Group& group : standing.groups)
    for (const auto& [rank, position] : group.positions)
      for (const Entry* entry : {position.call, position.transfer}) {
        if (entry == nullptr || entry->state == State::finished) continue;
        if (gave_up(*entry, *position.dump))
          longest.failed = true;
        else
          longest.seconds = std::max(longest.seconds, seconds_of(*entry, *position.dump));
      }
  return longest;
}

const char* name(Finding::Kind kind) {
  switch (kind) {
    case Finding::Kind::mismatch: return "mismatch";
    case Finding::Kind::never_called: return "never_called";
    case Finding::Kind::silent: return "silent";
    case Finding::Kind::lost: return "lost";
    case Finding::Kind::came_late: return "came_late";
    case Finding::Kind::circle: return "circle";
    case Finding::Kind::all_there: return "all_there";
  }
  return "unknown";
}

}  // namespace lockstep::flight
