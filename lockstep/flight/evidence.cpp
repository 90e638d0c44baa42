#include <algorithm>
#include <map>
#include <set>
#include <thread>

#include <lockstep/base/error.h>
#include <lockstep/flight/dump.h>
#include <lockstep/flight/report.h>

namespace lockstep::flight {

namespace {

constexpr milliseconds kLookInterval(20);

// Whether every member of every group has left a dump that answers this round.
bool all_answered(const std::vector<Dump>& dumps, std::int64_t round) {
  std::set<int> members;
  std::set<int> answered;
  for (const Dump& dump : dumps) {
    members.insert(dump.members.begin(), dump.members.end());
    if (dump.as_of_ns >= round) answered.insert(dump.global_rank());
  }
  return !members.empty() && members == answered;
}

}  // namespace

Evidence read_evidence(const std::filesystem::path& directory) {
  Evidence evidence;
  const auto demand = current_demand(directory);
  std::map<std::string, std::vector<int>> old;  // ranks by when they wrote
  std::uint32_t newest = 0;
  for (const auto& path : list_dumps(directory)) {
    try {
      Dump dump = read_dump(path);
      newest = std::max(newest, dump.generation);
      if (demand && is_old(dump.as_of_ns, demand->round))
        old[dump.wall_clock].push_back(dump.global_rank());
      else
        evidence.dumps.push_back(std::move(dump));
    } catch (const UsageError& error) {
      evidence.left_out.emplace_back(error.what());
    }
  }
  for (const auto& [when, ranks] : old)
    evidence.left_out.push_back(fmt::format("a dump of {} from {}: {} not answered since",
                                            list_ranks(ranks), when,
                                            ranks.size() == 1 ? "it has" : "they have"));
  const auto before = std::count_if(evidence.dumps.begin(), evidence.dumps.end(),
                                    [&](const Dump& dump) { return dump.generation != newest; });
  if (before > 0)
    evidence.left_out.push_back(
        fmt::format("{} dump{} of generations before {}", before, before == 1 ? "" : "s", newest));
  return evidence;
}

bool tells_of_failures(const std::filesystem::path& directory) {
  for (const auto& path : list_dumps(directory)) {
    try {
      if (!read_dump(path).cause.fault.empty()) return true;
    } catch (const UsageError&) {
      return true;
    }
  }
  return false;
}

Evidence demand_evidence(const std::filesystem::path& directory, milliseconds longest) {
  const Deadline deadline = Deadline::after(longest);
  const std::int64_t round = demand_dumps(directory);
  if (round == 0)
    throw UsageError("'{}' cannot be written to, and ranks are asked for dumps by a file there: "
                     "run this as the user who runs the job",
                     directory.string());
  while (true) {
    Evidence evidence = read_evidence(directory);
    if (all_answered(evidence.dumps, round) || deadline.passed()) return evidence;
    std::this_thread::sleep_for(kLookInterval);
  }
}

}  // namespace lockstep::flight
