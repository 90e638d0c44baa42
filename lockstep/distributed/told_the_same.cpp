#include <lockstep/distributed/told_the_same.h>

#include <algorithm>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/parallel/data_parallel/difference.h>

namespace lockstep {

namespace {

// Those of the one that the other has not.
std::string lines_missing(const std::vector<std::string>& of, const std::vector<std::string>& in) {
  std::vector<std::string> missing;
  std::ranges::copy_if(of, std::back_inserter(missing), [&](const std::string& line) {
    return std::ranges::find(in, line) == in.end();
  });
  constexpr std::size_t kMostShown = 8;
  const std::size_t more = missing.size() - std::min(missing.size(), kMostShown);
  missing.resize(missing.size() - more);
  if (missing.empty()) return "nothing of the kind";
  return fmt::format("{}{}", fmt::join(missing, "; "),
                     more > 0 ? fmt::format("; and {} more", more) : "");
}

}  // namespace

void check_told_the_same(const std::vector<std::string>& lines, const RankMessages& ranks) {
  if (ranks.size() == 1) return;
  const auto found = data_parallel::first_difference(lines, *ranks.group());
  if (!found) return;
  const auto all = data_parallel::gather_lines(lines, *ranks.group());
  const auto& first = all.front();
  const auto& other = all[static_cast<std::size_t>(found->rank)];
  throw UsageError("ranks were told different things, and would not train the same model.\n"
                   "  rank 0: {}\n  rank {}: {}\n"
                   "Start every rank with the same program, config and data; on several hosts, "
                   "look for a file that one of them has an older copy of",
                   lines_missing(first, other), found->rank, lines_missing(other, first));
}

}  // namespace lockstep
