#include <lockstep/flight/report.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <tuple>

#include <lockstep/base/error.h>

namespace lockstep::flight {

namespace {

// Where one rank stands among the numbered calls of its group.
struct Position {
  const Entry* entry = nullptr;  // the first call that is not finished, else the last; may be null
  std::uint64_t sequence = 0;    // of that call; 0 where it made none
  bool in_call = false;          // queued, started or failed
};

// The dumps of one group, by rank.
struct Group {
  const Dump* any = nullptr;
  std::map<int, const Dump*> by_rank;

  int num_ranks() const { return static_cast<int>(any->members.size()); }
};

Position position_of(const Dump& dump) {
  Position position;
  position.sequence = dump.last_sequence;
  for (const Entry& entry : dump.entries) {
    if (entry.sequence == 0) continue;
    position.entry = &entry;
    position.sequence = entry.sequence;
    if (entry.state != State::finished) {
      position.in_call = true;
      return position;
    }
  }
  // Point-to-point calls may have pushed the last numbered call out of the ring.
  if (position.sequence < dump.last_sequence) {
    position.entry = nullptr;
    position.sequence = dump.last_sequence;
  }
  return position;
}

std::string call_text(const Entry& entry, const char* at = "called at") {
  const std::string& what = entry.summary.empty() ? entry.operation : entry.summary;
  return entry.call_site.empty() ? what : fmt::format("{} {} {}", what, at, entry.call_site);
}

double seconds_between(std::int64_t from, std::int64_t to) {
  return static_cast<double>(std::max<std::int64_t>(to - from, 0)) * 1e-9;
}

// "5.0 s", or "4.8 to 5.0 s" where the ranks' times differ.
std::string span_text(const std::vector<double>& seconds) {
  const auto [least, most] = std::minmax_element(seconds.begin(), seconds.end());
  const std::string low = fmt::format("{:.1f}", *least);
  const std::string high = fmt::format("{:.1f}", *most);
  return low == high ? low + " s" : fmt::format("{} to {} s", low, high);
}

// Ranks of which the same is to be said, apart from their times.
struct Crowd {
  std::vector<int> ranks;
  std::vector<double> seconds;

  std::string who() const { return list_ranks(ranks); }
  bool single() const { return ranks.size() == 1; }
};

// What a rank is doing in a call, and for how long by its own clock.
std::string doing(const Entry& entry, const Crowd& crowd) {
  const char* is = crowd.single() ? "is" : "are";
  const std::string times = span_text(crowd.seconds);
  switch (entry.state) {
    case State::queued:
      return fmt::format("{} about to start {}, for {}", is, call_text(entry), times);
    case State::started: return fmt::format("{} in {}, for {}", is, call_text(entry), times);
    case State::failed: return fmt::format("failed in {} after {}", call_text(entry), times);
    case State::finished:
      return fmt::format("{} finished {}, {} ago", crowd.single() ? "has" : "have",
                         call_text(entry), times);
  }
  return "";
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

std::vector<Group> group_dumps(const std::vector<Dump>& dumps) {
  using Key = std::tuple<std::string, std::uint32_t, std::vector<int>>;
  std::map<Key, Group> groups;
  for (const Dump& dump : dumps) {
    Group& group = groups[Key(dump.group, dump.generation, dump.members)];
    if (group.any == nullptr) group.any = &dump;
    // Of two dumps by one rank the later call counts; only a hand-made set has two.
    const Dump*& mine = group.by_rank[dump.rank];
    if (mine == nullptr || mine->last_sequence <= dump.last_sequence) mine = &dump;
  }
  std::vector<Group> result;
  for (auto& [key, group] : groups) result.push_back(std::move(group));
  return result;
}

class GroupReport {
 public:
  explicit GroupReport(const Group& group) : group_(group) {
    for (const auto& [rank, dump] : group_.by_rank) {
      positions_[rank] = position_of(*dump);
      furthest_ = std::max(furthest_, positions_[rank].sequence);
    }
  }

  std::string text() {
    say_mismatch();
    say_positions();
    say_behind();
    say_point_to_point();
    say_missing();
    if (!troubled_) lines_.push_back("nothing is in flight");
    say_reasons();
    std::string text = heading();
    for (const std::string& line : lines_) text += "  " + line + "\n";
    return text;
  }

  bool troubled() const { return troubled_; }

 private:
  std::string heading() const {
    const auto& members = group_.any->members;
    std::vector<int> plain(members.size());
    std::iota(plain.begin(), plain.end(), 0);
    std::string text = fmt::format("group '{}' ({} rank{}", group_.any->group, members.size(),
                                   members.size() == 1 ? "" : "s");
    if (members != plain) {
      // In the group's order, which need not ascend.
      text += fmt::format(": global {}", list_ranks(members));
    }
    if (group_.any->generation != 0) text += fmt::format("; generation {}", group_.any->generation);
    return text + "):\n";
  }

  void add(std::string line, bool trouble) {
    lines_.push_back(std::move(line));
    troubled_ = troubled_ || trouble;
  }

  // The first call that ranks made differently: what comes after it follows from it.
  void say_mismatch() {
    std::map<std::uint64_t, std::map<std::string, std::pair<const Entry*, std::vector<int>>>> calls;
    for (const auto& [rank, dump] : group_.by_rank) {
      for (const Entry& entry : dump->entries) {
        if (entry.sequence == 0) continue;
        auto& [first, ranks] = calls[entry.sequence][entry.summary];
        if (first == nullptr) first = &entry;
        ranks.push_back(rank);
      }
    }
    for (const auto& [sequence, variants] : calls) {
      if (variants.size() < 2) continue;
      std::vector<std::pair<const Entry*, std::vector<int>>> ordered;
      for (const auto& [summary, variant] : variants) ordered.push_back(variant);
      // The few who differ come first; they are the more likely culprits.
      std::stable_sort(ordered.begin(), ordered.end(), [](const auto& a, const auto& b) {
        return a.second.size() < b.second.size();
      });
      std::string line = fmt::format("call #{} does not match: ", sequence);
      for (std::size_t i = 0; i < ordered.size(); ++i) {
        if (i > 0) line += i == 1 ? " while " : ", ";
        line += fmt::format("{} called {}", list_ranks(ordered[i].second),
                            call_text(*ordered[i].first, "at"));
      }
      add(std::move(line), true);
      return;
    }
  }

  // Those who are as far as anyone.
  void say_positions() {
    using Key = std::tuple<State, std::string, std::string>;
    std::map<Key, std::pair<const Entry*, Crowd>> crowds;
    std::vector<int> pushed_out;
    for (const auto& [rank, position] : positions_) {
      if (position.sequence != furthest_ || furthest_ == 0) continue;
      if (position.entry == nullptr) {
        pushed_out.push_back(rank);
        continue;
      }
      const Entry& entry = *position.entry;
      auto& [first, crowd] = crowds[Key(entry.state, entry.summary, entry.call_site)];
      if (first == nullptr) first = &entry;
      crowd.ranks.push_back(rank);
      crowd.seconds.push_back(seconds_of(entry, *group_.by_rank.at(rank)));
    }
    for (const auto& [key, said] : crowds) {
      const auto& [entry, crowd] = said;
      add(fmt::format("{} {}", crowd.who(), doing(*entry, crowd)),
          std::get<0>(key) != State::finished);
    }
    if (!pushed_out.empty())
      add(fmt::format("{} called up to #{}, and only point-to-point calls since",
                      list_ranks(pushed_out), furthest_),
          false);
  }

  void say_behind() {
    std::vector<int> silent;
    for (const auto& [rank, position] : positions_) {
      if (position.sequence == furthest_) continue;
      const Dump& dump = *group_.by_rank.at(rank);
      if (position.sequence == 0) {
        silent.push_back(rank);
        continue;
      }
      std::string line = fmt::format("rank {} is behind: ", rank);
      if (position.entry == nullptr) {
        line += fmt::format("its last call is #{}", position.sequence);
      } else if (position.in_call) {
        const Crowd self{{rank}, {seconds_of(*position.entry, dump)}};
        line += fmt::format("it {}", doing(*position.entry, self));
      } else {
        line += fmt::format("its last call, {}, finished {:.1f} s ago", call_text(*position.entry),
                            seconds_of(*position.entry, dump));
      }
      if (dump.last_sequence < furthest_) {
        line +=
            dump.last_sequence + 1 == furthest_
                ? fmt::format("; it never called #{}", furthest_)
                : fmt::format("; it never called #{} to #{}", dump.last_sequence + 1, furthest_);
      }
      add(std::move(line), true);
    }
    if (!silent.empty())
      add(fmt::format("{} {} behind: no call made in this group; others are at #{}",
                      list_ranks(silent), silent.size() == 1 ? "is" : "are", furthest_),
          true);
  }

  void say_point_to_point() {
    for (const auto& [rank, dump] : group_.by_rank) {
      for (const Entry& entry : dump->entries) {
        if (entry.sequence != 0 || entry.state == State::finished) continue;
        const Crowd self{{rank}, {seconds_of(entry, *dump)}};
        add(fmt::format("rank {} {}", rank, doing(entry, self)), true);
        break;  // the oldest is what it waits for
      }
    }
  }

  void say_missing() {
    std::vector<int> missing;
    for (int rank = 0; rank < group_.num_ranks(); ++rank)
      if (!group_.by_rank.contains(rank)) missing.push_back(rank);
    if (!missing.empty())
      add(fmt::format("no word from {}: killed or stopped before a dump was written, or it lies "
                      "on another host",
                      list_ranks(missing)),
          true);
  }

  void say_reasons() {
    std::map<std::string, std::vector<int>> by_reason;
    for (const auto& [rank, dump] : group_.by_rank)
      if (!dump->reason.empty()) by_reason[dump->reason].push_back(rank);
    constexpr std::size_t kMost = 8;
    std::size_t said = 0;
    for (const auto& [reason, ranks] : by_reason) {
      if (said++ == kMost) {
        lines_.push_back(fmt::format("and {} more reasons", by_reason.size() - kMost));
        return;
      }
      lines_.push_back(fmt::format("{} gave up because: {}", list_ranks(ranks), reason));
    }
  }

  const Group& group_;
  std::map<int, Position> positions_;
  std::uint64_t furthest_ = 0;
  std::vector<std::string> lines_;
  bool troubled_ = false;
};

}  // namespace

std::string merged_report(const std::vector<Dump>& dumps) {
  struct Part {
    bool troubled;
    int num_ranks;
    std::string text;
  };
  std::vector<Part> parts;
  for (const Group& group : group_dumps(dumps)) {
    GroupReport report(group);
    std::string text = report.text();
    parts.push_back({report.troubled(), group.num_ranks(), std::move(text)});
  }
  std::stable_sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) {
    return std::tuple(!a.troubled, -a.num_ranks) < std::tuple(!b.troubled, -b.num_ranks);
  });
  std::string text;
  for (const Part& part : parts) text += part.text;
  return text;
}

std::string merged_report(const std::filesystem::path& directory) {
  std::vector<Dump> dumps;
  std::string unreadable;
  for (const auto& path : list_dumps(directory)) {
    try {
      dumps.push_back(read_dump(path));
    } catch (const UsageError& error) {
      unreadable += fmt::format("left out: {}\n", error.what());
    }
  }
  return merged_report(dumps) + unreadable;
}

}  // namespace lockstep::flight
