#include <lockstep/flight/diagnosis.h>

#include <algorithm>

#include <lockstep/base/error.h>

namespace lockstep::flight {

namespace {

constexpr std::size_t kMostFindings = 4;
constexpr std::size_t kMostRanksDescribed = 3;
constexpr std::size_t kLongestList = 48;
// Calls that take no longer than this are seen in a healthy job, too.
constexpr double kAtWorkSeconds = 1;

bool one(const std::vector<int>& ranks) { return ranks.size() == 1; }

// "ranks 0-4 and 6-63", or "731 ranks" where a list would take a line.
std::string who(const std::vector<int>& ranks) {
  const std::string list = list_ranks(ranks);
  return list.size() <= kLongestList ? list : fmt::format("{} ranks", ranks.size());
}

// "all_reduce #7 of group 'tp' (train.cpp:42)"
std::string call_of(const Entry& call, const Group& group) {
  std::string text = fmt::format("{} of group '{}'", short_name(call, group), group.name);
  if (!call.call_site.empty()) text += fmt::format(" ({})", call.call_site);
  return text;
}

std::string capital(std::string text) {
  if (!text.empty() && text[0] >= 'a' && text[0] <= 'z') text[0] = static_cast<char>(text[0] - 32);
  return text;
}

// "ranks 0-4 wait for it, for 5.0 s now"
std::string waiting_text(const Finding& finding, const std::string& in = "") {
  if (finding.waiting.empty()) return "nobody waits for it yet";
  const bool alone = one(finding.waiting);
  const char* them = one(finding.ranks) ? "it" : "them";
  std::string text = who(finding.waiting);
  text += finding.given_up ? " waited" : (alone ? " waits" : " wait");
  text += fmt::format(" for {}{}, ", them, in);
  if (finding.chain.size() > 1) text += "directly or through others, ";
  text += fmt::format("for {}", duration_text(finding.seconds));
  return text + (finding.given_up ? ", and gave up" : " now");
}

std::string chain_text(const std::vector<Wait>& chain) {
  std::string text;
  for (std::size_t i = 0; i < chain.size(); ++i) {
    const Wait& wait = chain[i];
    const int next = i + 1 < chain.size() ? chain[i + 1].rank : wait.for_ranks.front();
    text += i == 0 ? fmt::format("rank {}", wait.rank) : ", which";
    text += fmt::format(" waits in {} for rank {}", call_of(*wait.call, *wait.group), next);
  }
  return text;
}

// The last thing that a rank is known to have done.
std::string whereabouts(int rank, const Standing& standing) {
  const Entry* last = nullptr;
  const Group* in = nullptr;
  const Dump* dump = nullptr;
  for (const Group& group : standing.groups) {
    const auto found = group.positions.find(rank);
    if (found == group.positions.end()) continue;
    if (dump == nullptr) dump = found->second.dump;
    for (const Entry& entry : found->second.dump->entries) {
      if (entry.state != State::finished) continue;
      if (last != nullptr && entry.finished_ns <= last->finished_ns) continue;
      last = &entry;
      in = &group;
      dump = found->second.dump;
    }
  }
  if (dump == nullptr) return "";
  std::string text =
      last == nullptr ? fmt::format("Rank {} has finished no call yet", rank)
                      : fmt::format("Rank {}'s last call, {}, ended {} ago", rank,
                                    call_of(*last, *in), duration_text(seconds_of(*last, *dump)));
  if (const auto& progress = dump->progress) {
    Entry noted;
    noted.state = State::finished;
    noted.finished_ns = progress->noted_ns;
    text += fmt::format("; its program said {} ago that it is in step {}{}",
                        duration_text(seconds_of(noted, *dump)), progress->step,
                        progress->phase.empty() ? "" : fmt::format(" ({})", progress->phase));
  }
  return text + ".";
}

std::string sentence(const Finding& finding) {
  const std::string ranks = who(finding.ranks);
  const bool alone = one(finding.ranks);
  switch (finding.kind) {
    case Finding::Kind::mismatch: {
      std::string text =
          fmt::format("ranks made different calls as #{} of group '{}': ", finding.call->sequence,
                      finding.group->name);
      for (std::size_t i = 0; i < finding.variants.size(); ++i) {
        const auto& [call, who_called] = finding.variants[i];
        text += fmt::format("{}{} called {}{}", i == 0 ? "" : ", ", who(who_called),
                            call->summary.empty() ? call->operation : call->summary,
                            call->call_site.empty() ? "" : " at " + call->call_site);
      }
      return text;
    }
    case Finding::Kind::never_called:
      if (finding.call->sequence == 0)
        return fmt::format("{} {} not come to the {} that rank {} is in; {}", ranks,
                           alone ? "has" : "have", call_of(*finding.call, *finding.group),
                           finding.waiter, waiting_text(finding));
      return fmt::format("{} never called {}; {}", ranks, call_of(*finding.call, *finding.group),
                         waiting_text(finding));
    case Finding::Kind::silent:
      return fmt::format(
          "{} left no dump: {} stopped or dead, or on a host whose dumps are not here; {}", ranks,
          alone ? "it is" : "they are",
          waiting_text(finding, " in " + call_of(*finding.call, *finding.group)));
    case Finding::Kind::lost:
      return fmt::format("{} {} gone; {}", ranks, alone ? "is" : "are",
                         waiting_text(finding, " in " + call_of(*finding.call, *finding.group)));
    case Finding::Kind::came_late:
      return fmt::format("{} came to {} when {} had given up, at least {} after the first", ranks,
                         call_of(*finding.call, *finding.group), who(finding.waiting),
                         duration_text(finding.seconds));
    case Finding::Kind::circle:
      return "ranks wait for each other in a circle: " + chain_text(finding.chain);
    case Finding::Kind::all_there:
      return fmt::format(
          "{} of group '{}' {} in {}{}, for {}: nobody is missing, but it does not end",
          finding.ranks.size() == finding.group->members.size() && !alone
              ? fmt::format("all {} ranks", finding.ranks.size())
              : ranks,
          finding.group->name, finding.given_up ? (alone ? "was" : "were") : (alone ? "is" : "are"),
          short_name(*finding.call, *finding.group),
          finding.call->call_site.empty() ? "" : " (" + finding.call->call_site + ")",
          duration_text(finding.seconds));
  }
  return "";
}

}  // namespace

std::string duration_text(double seconds) {
  if (seconds < 60) return fmt::format("{:.1f} s", seconds);
  const auto whole = static_cast<std::int64_t>(seconds);
  if (whole < 3600) return fmt::format("{} min {} s", whole / 60, whole % 60);
  return fmt::format("{} h {} min", whole / 3600, whole / 60 % 60);
}

std::string verdict(const Standing& standing) {
  const std::vector<Finding> findings = diagnose(standing);
  const Longest longest = longest_wait(standing);
  if (findings.empty())
    return standing.silent.empty()
               ? "Nothing hangs: no rank is in a call.\n"
               : fmt::format("No rank is in a call; {} left no dump.\n",
                             who({standing.silent.begin(), standing.silent.end()}));
  std::string text;
  const bool mismatch = findings.front().kind == Finding::Kind::mismatch;
  if (!longest.failed && longest.seconds < kAtWorkSeconds && !mismatch)
    text += fmt::format("No call has failed or takes longer than {}: this may be a job at work.\n",
                        duration_text(longest.seconds));
  for (std::size_t i = 0; i < findings.size(); ++i) {
    if (i == kMostFindings) {
      text += fmt::format("And {} more.\n", findings.size() - kMostFindings);
      break;
    }
    const Finding& finding = findings[i];
    text += capital(sentence(finding)) + ".\n";
    if (finding.kind == Finding::Kind::never_called)
      for (std::size_t j = 0; j < std::min(finding.ranks.size(), kMostRanksDescribed); ++j)
        if (const std::string line = whereabouts(finding.ranks[j], standing); !line.empty())
          text += "  " + line + "\n";
    if (finding.kind != Finding::Kind::circle && finding.chain.size() > 1)
      text += "  " + capital(chain_text(finding.chain)) + ".\n";
  }
  return text;
}

}  // namespace lockstep::flight
