#include <lockstep/base/error.h>

#include <algorithm>
#include <numeric>

namespace lockstep {

const char* fault_name(Fault fault) {
  switch (fault) {
    case Fault::timeout: return "timeout";
    case Fault::peer_lost: return "peer lost";
    case Fault::mismatch: return "mismatch";
    case Fault::aborted: return "aborted";
    case Fault::corrupted: return "corrupted";
    case Fault::refused: return "refused";
    case Fault::engine: return "engine";
  }
  return "unknown";
}

namespace {

// Translates a group's rank numbers to the job's. Numbers that are not in the group stay as they
// are.
std::vector<int> in_job(const std::vector<int>& ranks, const std::vector<int>& global_ranks) {
  std::vector<int> result;
  for (const int rank : ranks) {
    const bool member = rank >= 0 && static_cast<std::size_t>(rank) < global_ranks.size();
    result.push_back(member ? global_ranks[static_cast<std::size_t>(rank)] : rank);
  }
  return result;
}

// Whether a group's ranks are called otherwise in the job.
bool renumbered(const std::vector<int>& global_ranks) {
  for (std::size_t rank = 0; rank < global_ranks.size(); ++rank)
    if (global_ranks[rank] != static_cast<int>(rank)) return true;
  return false;
}

// Explains how to read the rank numbers in an explanation, which count within the group. Empty for
// a large group whose ranks follow no simple rule.
std::string legend(const CommError::Details& details) {
  constexpr std::size_t kListed = 8;
  const std::vector<int>& to = details.global_ranks;
  if (to.size() <= kListed) {
    std::vector<int> from(to.size());
    std::iota(from.begin(), from.end(), 0);
    return fmt::format(" ({} of '{}' {} job {}.)",
                       to.size() == 1 ? "Rank 0" : "R" + list_ranks(from).substr(1), details.group,
                       to.size() == 1 ? "is" : "are", list_ranks(to));
  }
  const int step = to[1] - to[0];
  for (std::size_t rank = 1; rank < to.size(); ++rank)
    if (to[rank] - to[rank - 1] != step) return "";
  const std::string offset = to[0] == 0 ? "" : fmt::format("{} + ", to[0]);
  const std::string product = step == 1 ? "r" : fmt::format("{} r", step);
  return fmt::format(" (Rank r of '{}' is job rank {}{}.)", details.group, offset, product);
}

std::string compose(const CommError::Details& details) {
  const bool both = renumbered(details.global_ranks);
  const auto named = [&](const std::vector<int>& ranks) {
    std::string text = list_ranks(ranks);
    if (both) text += fmt::format(" (job {})", list_ranks(in_job(ranks, details.global_ranks)));
    return text;
  };
  std::string text = details.operation.empty() ? std::string("communication") : details.operation;
  if (details.sequence != 0) text += fmt::format(" (call #{})", details.sequence);
  if (!details.group.empty()) text += fmt::format(" in group '{}'", details.group);
  text += fmt::format(" failed: {}", fault_name(details.fault));
  if (!details.ranks.empty())
    text += (details.fault == Fault::aborted ? " by " : " of ") + named(details.ranks);
  if (!details.explanation.empty()) text += ". " + details.explanation;
  if (details.found_by >= 0) text += fmt::format(" (Found by {}.)", named({details.found_by}));
  if (both && !details.explanation.empty()) text += legend(details);
  return text;
}

}  // namespace

CommError::CommError(Details details) : Error(compose(details)), details_(std::move(details)) {}

std::vector<int> CommError::global_ranks() const {
  std::vector<int> result = in_job(details_.ranks, details_.global_ranks);
  std::sort(result.begin(), result.end());
  return result;
}

std::string list_ranks(const std::vector<int>& ranks) {
  std::vector<std::string> parts;
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t j = i;
    while (j + 1 < ranks.size() && ranks[j + 1] == std::int64_t{ranks[j]} + 1) ++j;
    if (j - i >= 2) {
      parts.push_back(fmt::format("{}-{}", ranks[i], ranks[j]));
    } else {
      for (std::size_t k = i; k <= j; ++k) parts.push_back(std::to_string(ranks[k]));
    }
    i = j + 1;
  }
  if (parts.empty()) return "no rank";
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (i > 0) text += i + 1 == parts.size() ? " and " : ", ";
    text += parts[i];
  }
  return text;
}

void internal::check_failed(const char* condition, const char* file, int line,
                            const std::string& message) {
  throw InternalError(fmt::format("internal check failed: {} ({}:{}){}{}", condition, file, line,
                                  message.empty() ? "" : ": ", message));
}

}  // namespace lockstep
