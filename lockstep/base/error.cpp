#include <lockstep/base/error.h>

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

std::string compose(const CommError::Details& details) {
  std::string text = details.operation.empty() ? std::string("communication") : details.operation;
  if (details.sequence != 0) text += fmt::format(" (call #{})", details.sequence);
  if (!details.group.empty()) text += fmt::format(" in group '{}'", details.group);
  text += fmt::format(" failed: {}", fault_name(details.fault));
  if (!details.ranks.empty()) text += " of " + list_ranks(details.ranks);
  if (!details.explanation.empty()) text += ". " + details.explanation;
  if (details.found_by >= 0) text += fmt::format(" (Found by rank {}.)", details.found_by);
  return text;
}

}  // namespace

CommError::CommError(Details details) : Error(compose(details)), details_(std::move(details)) {}

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
