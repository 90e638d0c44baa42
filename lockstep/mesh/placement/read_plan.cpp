#include <lockstep/mesh/placement/read_plan.h>

#include <algorithm>
#include <limits>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>

namespace lockstep::mesh {

namespace {

// A run of one holder, by its place in my storage.
struct Source {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t source_offset = 0;  // of begin
  int holder = 0;
};

// Ascending; of one begin, by holder.
std::vector<Source> all_sources(const Placement& mine, std::span<const Placement> holders) {
  std::vector<Source> sources;
  for (std::size_t i = 0; i < holders.size(); ++i) {
    for_each_run(mine, holders[i], [&](const SharedRun& run) {
      sources.push_back(
          {run.a_offset, run.a_offset + run.count, run.b_offset, static_cast<int>(i)});
    });
  }
  std::stable_sort(sources.begin(), sources.end(),
                   [](const Source& a, const Source& b) { return a.begin < b.begin; });
  return sources;
}

// Walks my storage in segments within which the same sources are at hand, and calls
// visit(begin, end, sources); the list is empty where nobody holds the segment.
template <typename Visit>
void sweep(std::int64_t elements, const std::vector<Source>& sources, const Visit& visit) {
  std::vector<Source> at_hand;
  std::size_t next = 0;
  for (std::int64_t at = 0; at < elements;) {
    std::erase_if(at_hand, [&](const Source& source) { return source.end <= at; });
    for (; next < sources.size() && sources[next].begin == at; ++next)
      at_hand.push_back(sources[next]);
    std::int64_t end = next < sources.size() ? sources[next].begin : elements;
    for (const Source& source : at_hand) end = std::min(end, source.end);
    visit(at, end, at_hand);
    at = end;
  }
}

void append(std::vector<Stretch>& stretches, std::int64_t begin, std::int64_t end) {
  if (!stretches.empty() && stretches.back().offset + stretches.back().count == begin)
    stretches.back().count += end - begin;
  else
    stretches.push_back({begin, end - begin});
}

// Deals segments to holders.
class Dealer {
 public:
  Dealer(std::size_t num_holders, const ReadOptions& options) : options_(options) {
    plan_.elements_from.resize(num_holders);
  }

  void deal(std::int64_t begin, std::int64_t end, const std::vector<Source>& candidates) {
    if (candidates.empty()) {
      append(plan_.missing, begin, end);
      return;
    }
    const auto num_candidates = static_cast<std::int64_t>(candidates.size());
    const std::int64_t smallest = std::max<std::int64_t>(options_.smallest_piece, 1);
    const std::int64_t share =
        (end - begin) / num_candidates + ((end - begin) % num_candidates != 0 ? 1 : 0);
    const std::int64_t piece = std::max(share, smallest);
    for (std::int64_t at = begin; at < end;) {
      const std::int64_t count = std::min(piece, end - at);
      take(choose(at, candidates), at, count);
      at += count;
    }
  }

  ReadPlan plan() && { return std::move(plan_); }

 private:
  const Source& choose(std::int64_t at, const std::vector<Source>& candidates) const {
    const Source* best = nullptr;
    const Source* current = nullptr;
    for (const Source& source : candidates) {
      if (options_.local == source.holder) return source;
      if (best == nullptr || before(source, *best)) best = &source;
      if (continues(source, at)) current = &source;
    }
    // One long read is better than two, while it costs the balance less than a piece.
    if (current != nullptr &&
        load(*current) < load(*best) + std::max<std::int64_t>(options_.smallest_piece, 1))
      return *current;
    return *best;
  }

  std::int64_t load(const Source& source) const {
    return plan_.elements_from[static_cast<std::size_t>(source.holder)];
  }

  // The less loaded first; of equals, the first from this reader's number on.
  bool before(const Source& a, const Source& b) const {
    if (load(a) != load(b)) return load(a) < load(b);
    return turn(a.holder) < turn(b.holder);
  }
  std::int64_t turn(int holder) const {
    const auto num_holders = static_cast<std::int64_t>(plan_.elements_from.size());
    return ((holder - static_cast<std::int64_t>(options_.reader)) % num_holders + num_holders) %
           num_holders;
  }

  bool continues(const Source& source, std::int64_t at) const {
    if (plan_.reads.empty()) return false;
    const Read& last = plan_.reads.back();
    return last.holder == source.holder && last.destination_offset + last.count == at &&
           last.source_offset + last.count == source.source_offset + (at - source.begin);
  }

  void take(const Source& source, std::int64_t at, std::int64_t count) {
    if (continues(source, at))
      plan_.reads.back().count += count;
    else
      plan_.reads.push_back({source.holder, source.source_offset + (at - source.begin), at, count});
    plan_.elements_from[static_cast<std::size_t>(source.holder)] += count;
  }

  ReadOptions options_;
  ReadPlan plan_;
};

}  // namespace

ReadPlan plan_reads(const Placement& mine, std::span<const Placement> holders,
                    const ReadOptions& options) {
  Dealer dealer(holders.size(), options);
  sweep(mine.elements(), all_sources(mine, holders),
        [&](std::int64_t begin, std::int64_t end, const std::vector<Source>& sources) {
          dealer.deal(begin, end, sources);
        });
  return std::move(dealer).plan();
}

std::vector<Stretch> held_by_none(const Placement& mine, std::span<const Placement> others) {
  std::vector<Stretch> result;
  sweep(mine.elements(), all_sources(mine, others),
        [&](std::int64_t begin, std::int64_t end, const std::vector<Source>& sources) {
          if (sources.empty()) append(result, begin, end);
        });
  return result;
}

void ReadPlan::check_complete(const std::string& tensor, const Placement& mine) const {
  if (complete()) return;
  std::int64_t count = 0;
  for (const Stretch& stretch : missing) count += stretch.count;
  throw UsageError(
      "tensor '{}' of shape [{}]: nobody holds {} of the {} elements needed ({}), the first of "
      "them at [{}]",
      tensor, fmt::join(mine.shape(), ", "), count, mine.elements(), mine.text(),
      fmt::join(mine.coordinates(missing.front().offset), ", "));
}

}  // namespace lockstep::mesh
