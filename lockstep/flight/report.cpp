#include <lockstep/flight/report.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

#include <nlohmann/json.hpp>

#include <lockstep/base/error.h>
#include <lockstep/flight/diagnosis.h>

namespace lockstep::flight {

namespace {

std::string call_text(const Entry& entry, const Group& group) {
  std::string text = entry.summary.empty() ? entry.operation : entry.summary;
  if (const auto peers = peers_of(entry, group); !peers.empty())
    text += " with " + list_ranks(peers);
  return entry.call_site.empty() ? text : fmt::format("{} called at {}", text, entry.call_site);
}

// Ranks that share a sentence of the report, apart from their times.
struct Crowd {
  const Group* group = nullptr;
  const Entry* call = nullptr;
  std::vector<int> ranks;
  std::vector<double> seconds;

  void add(int rank, const Group& in, const Entry& entry, const Dump& dump) {
    group = &in;
    if (call == nullptr) call = &entry;
    ranks.push_back(rank);
    seconds.push_back(seconds_of(entry, dump));
  }
  std::string who() const { return list_ranks(ranks); }
  bool single() const { return ranks.size() == 1; }

  // "5.0 s", or "4.8 s to 5.0 s" where the ranks' times differ.
  std::string times() const {
    const auto [least, most] = std::minmax_element(seconds.begin(), seconds.end());
    const std::string low = duration_text(*least);
    const std::string high = duration_text(*most);
    return low == high ? low : fmt::format("{} to {}", low, high);
  }

  // Says what the ranks are doing, and for how long by their own clocks.
  std::string doing() const {
    const char* is = single() ? "is" : "are";
    switch (call->state) {
      case State::queued:
        return fmt::format("{} about to start {}, for {}", is, call_text(*call, *group), times());
      case State::started:
        return fmt::format("{} in {}, for {}", is, call_text(*call, *group), times());
      case State::failed:
        return fmt::format("failed in {} after {}", call_text(*call, *group), times());
      case State::finished:
        return fmt::format("{} finished {}, {} ago", single() ? "has" : "have",
                           call_text(*call, *group), times());
    }
    return "";
  }
};

// Ranks with equal values share a sentence.
using Sameness = std::tuple<State, std::string, std::string, std::uint64_t>;

Sameness sameness_of(const Entry& entry, std::uint64_t last_sequence = 0) {
  return {entry.state, entry.summary, entry.call_site, last_sequence};
}

class GroupReport {
 public:
  explicit GroupReport(const Group& group) : group_(group) {}

  std::string text() {
    say_positions();
    say_behind();
    say_transfers();
    say_missing();
    if (!group_.in_trouble()) lines_.emplace_back("nothing is in flight");
    say_reasons();
    std::string text = heading();
    for (const std::string& line : lines_) text += "  " + line + "\n";
    return text;
  }

 private:
  std::string heading() const {
    const auto& members = group_.members;
    std::vector<int> plain(members.size());
    std::iota(plain.begin(), plain.end(), 0);
    std::string text =
        members == plain
            ? fmt::format("group '{}' ({} rank{}", group_.name, members.size(),
                          members.size() == 1 ? "" : "s")
            // In the group's order, which need not ascend.
            : fmt::format("group '{}' (of the job's {}", group_.name, list_ranks(members));
    if (group_.generation != 0) text += fmt::format("; generation {}", group_.generation);
    return text + "):\n";
  }

  // Says where the ranks are that are furthest.
  void say_positions() {
    std::map<Sameness, Crowd> crowds;
    std::vector<int> pushed_out;
    for (const auto& [rank, position] : group_.positions) {
      if (position.sequence != group_.furthest || group_.furthest == 0) continue;
      if (position.call == nullptr) {
        pushed_out.push_back(rank);
      } else {
        crowds[sameness_of(*position.call)].add(rank, group_, *position.call, *position.dump);
      }
    }
    for (const auto& [key, crowd] : crowds)
      lines_.push_back(fmt::format("{} {}", crowd.who(), crowd.doing()));
    if (!pushed_out.empty())
      lines_.push_back(fmt::format("{} called up to #{}, and only point-to-point calls since",
                                   list_ranks(pushed_out), group_.furthest));
  }

  void say_behind() {
    std::map<Sameness, Crowd> crowds;
    std::map<std::uint64_t, std::vector<int>> pushed_out;  // by their last call
    for (const auto& [rank, position] : group_.positions) {
      if (position.sequence == group_.furthest) continue;
      const std::uint64_t last = position.dump->last_sequence;
      if (position.call == nullptr) {
        pushed_out[position.sequence].push_back(rank);
      } else {
        crowds[sameness_of(*position.call, last)].add(rank, group_, *position.call, *position.dump);
      }
    }
    for (const auto& [key, crowd] : crowds) {
      const bool over = crowd.call->state == State::finished;
      const std::string where =
          over ? fmt::format("{} last call, {}, finished {} ago", crowd.single() ? "its" : "their",
                             call_text(*crowd.call, group_), crowd.times())
               : fmt::format("{} {}", crowd.single() ? "it" : "they", crowd.doing());
      say_is_behind(crowd.ranks, where, std::get<std::uint64_t>(key));
    }
    for (const auto& [last, ranks] : pushed_out) {
      if (last == 0)
        lines_.push_back(fmt::format("{} {} behind: no call made in this group; others are at #{}",
                                     list_ranks(ranks), ranks.size() == 1 ? "is" : "are",
                                     group_.furthest));
      else
        say_is_behind(ranks,
                      fmt::format("{} last call is #{}", ranks.size() == 1 ? "its" : "their", last),
                      last);
    }
  }

  void say_is_behind(const std::vector<int>& ranks, const std::string& where, std::uint64_t last) {
    std::string line =
        fmt::format("{} {} behind: {}", list_ranks(ranks), ranks.size() == 1 ? "is" : "are", where);
    const char* they = ranks.size() == 1 ? "it" : "they";
    if (last + 1 == group_.furthest)
      line += fmt::format("; {} never called #{}", they, group_.furthest);
    else if (last < group_.furthest)
      line += fmt::format("; {} never called #{} to #{}", they, last + 1, group_.furthest);
    lines_.push_back(std::move(line));
  }

  void say_transfers() {
    for (const auto& [rank, position] : group_.positions) {
      if (position.transfer == nullptr) continue;
      Crowd self;
      self.add(rank, group_, *position.transfer, *position.dump);
      lines_.push_back(fmt::format("rank {} {}", rank, self.doing()));
    }
  }

  void say_missing() {
    std::vector<int> missing;
    for (const int rank : group_.members)
      if (!group_.positions.contains(rank)) missing.push_back(rank);
    std::sort(missing.begin(), missing.end());
    if (!missing.empty())
      lines_.push_back(
          fmt::format("no word from {}: killed or stopped before a dump was written, or it lies "
                      "on another host",
                      list_ranks(missing)));
  }

  void say_reasons() {
    std::map<std::string, std::vector<int>> by_reason;
    for (const auto& [rank, position] : group_.positions) {
      const Cause& cause = position.dump->cause;
      if (!cause.fault.empty()) by_reason[cause.reason].push_back(rank);
    }
    constexpr std::size_t kMost = 3;
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
  std::vector<std::string> lines_;
};

}  // namespace

std::string merged_report(const std::vector<Dump>& dumps) {
  if (dumps.empty()) return "";
  const Standing standing = standing_of(dumps);
  std::vector<const Group*> troubled;
  std::vector<std::string> quiet;
  for (const Group& group : standing.groups) {
    if (group.in_trouble())
      troubled.push_back(&group);
    else
      quiet.push_back(fmt::format("'{}' of {}", group.name, list_ranks(group.members)));
  }
  std::stable_sort(troubled.begin(), troubled.end(), [](const Group* a, const Group* b) {
    return a->members.size() > b->members.size();
  });
  std::string text = verdict(standing);
  for (const Group* group : troubled) text += "\n" + GroupReport(*group).text();
  if (troubled.empty()) {
    for (const Group& group : standing.groups) text += "\n" + GroupReport(group).text();
  } else if (!quiet.empty()) {
    constexpr std::size_t kMost = 6;
    text += "\nnothing is in flight in ";
    for (std::size_t i = 0; i < std::min(quiet.size(), kMost); ++i)
      text += (i == 0 ? "" : ", ") + quiet[i];
    if (quiet.size() > kMost) text += fmt::format(" and {} more groups", quiet.size() - kMost);
    text += "\n";
  }
  return text;
}

std::string merged_report(const Evidence& evidence) {
  std::string text = merged_report(evidence.dumps);
  for (const std::string& note : evidence.left_out) text += fmt::format("left out: {}\n", note);
  return text;
}

std::string merged_report(const std::filesystem::path& directory) {
  return merged_report(read_evidence(directory));
}

bool hangs(const std::vector<Dump>& dumps) {
  const Standing standing = standing_of(dumps);
  const Longest longest = longest_wait(standing);
  return longest.failed || longest.seconds > 1;
}

namespace {

using nlohmann::json;

json call_json(const Entry& entry, const Dump& dump) {
  return {{"operation", entry.operation}, {"sequence", entry.sequence},
          {"summary", entry.summary},     {"call_site", entry.call_site},
          {"state", name(entry.state)},   {"seconds", seconds_of(entry, dump)}};
}

json wait_json(const Wait& wait) {
  return {{"rank", wait.rank},
          {"group", wait.group->name},
          {"call", call_json(*wait.call, *wait.dump)},
          {"for_ranks", wait.for_ranks}};
}

json finding_json(const Finding& finding) {
  json result = {{"kind", name(finding.kind)},
                 {"ranks", finding.ranks},
                 {"group", finding.group->name},
                 {"members", finding.group->members},
                 {"operation", finding.call->operation},
                 {"sequence", finding.call->sequence},
                 {"call_site", finding.call->call_site},
                 {"waiting", finding.waiting},
                 {"seconds", finding.seconds},
                 {"given_up", finding.given_up},
                 {"chain", json::array()}};
  for (const Wait& wait : finding.chain) result["chain"].push_back(wait_json(wait));
  if (finding.kind == Finding::Kind::mismatch) {
    result["variants"] = json::array();
    for (const auto& [call, ranks] : finding.variants)
      result["variants"].push_back(
          {{"ranks", ranks}, {"summary", call->summary}, {"call_site", call->call_site}});
  }
  return result;
}

json group_json(const Group& group) {
  json ranks = json::array();
  for (const auto& [rank, position] : group.positions) {
    json one = {{"rank", rank},
                {"host", position.dump->host},
                {"pid", position.dump->pid},
                {"wall_clock", position.dump->wall_clock},
                {"last_sequence", position.dump->last_sequence},
                {"in_call", position.in_call || position.transfer != nullptr},
                {"reason", position.dump->cause.reason}};
    if (position.call != nullptr) one["call"] = call_json(*position.call, *position.dump);
    if (position.transfer != nullptr)
      one["transfer"] = call_json(*position.transfer, *position.dump);
    if (const auto& progress = position.dump->progress)
      one["progress"] = {{"step", progress->step}, {"phase", progress->phase}};
    ranks.push_back(std::move(one));
  }
  std::vector<int> missing;
  for (const int member : group.members)
    if (!group.positions.contains(member)) missing.push_back(member);
  return {{"name", group.name},       {"generation", group.generation},
          {"members", group.members}, {"ranks", std::move(ranks)},
          {"no_dump", missing},       {"in_trouble", group.in_trouble()}};
}

json report_json(const std::vector<Dump>& dumps) {
  const Standing standing = standing_of(dumps);
  json result = {{"hangs", hangs(dumps)},
                 {"verdict", dumps.empty() ? "" : verdict(standing)},
                 {"silent", standing.silent},
                 {"findings", json::array()},
                 {"groups", json::array()}};
  for (const Finding& finding : diagnose(standing))
    result["findings"].push_back(finding_json(finding));
  for (const Group& group : standing.groups) result["groups"].push_back(group_json(group));
  return result;
}

std::string text_of(const json& value) {
  return value.dump(2, ' ', false, json::error_handler_t::replace) + "\n";
}

}  // namespace

std::string merged_report_json(const std::vector<Dump>& dumps) {
  return text_of(report_json(dumps));
}

std::string merged_report_json(const Evidence& evidence) {
  json result = report_json(evidence.dumps);
  result["left_out"] = evidence.left_out;
  return text_of(result);
}

}  // namespace lockstep::flight
