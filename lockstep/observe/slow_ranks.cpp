#include <lockstep/observe/slow_ranks.h>

#include <algorithm>
#include <cmath>

#include <lockstep/base/error.h>

namespace lockstep::observe {

namespace {

// The lower of the two middle values, so that two slow ranks of three are both found.
double lower_median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

bool known(double seconds) { return std::isfinite(seconds) && seconds > 0; }

}  // namespace

std::string SlowRanks::News::text() const {
  if (kind == Kind::well_again)
    return fmt::format("rank {} is about as fast as the others again: its own part of a step takes "
                       "{:.3g} s, that of the others {:.3g} s",
                       rank, seconds, others_seconds);
  return fmt::format("rank {} is slow: its own part of a step takes {:.3g} s, that of the others "
                     "{:.3g} s ({:.1f} times)",
                     rank, seconds, others_seconds, ratio);
}

SlowRanks::SlowRanks(std::vector<int> ranks, Options options) : options_(options) {
  if (ranks.size() < 2)
    throw UsageError("ranks are compared with each other: {} cannot be", ranks.size());
  if (!(options.well >= 1 && options.slow > options.well && options.worth_seconds >= 0))
    throw UsageError("slow from {} times on and well below {}: 1 <= well < slow is needed, and a "
                     "difference worth a word that is not negative",
                     options.slow, options.well);
  for (const int rank : ranks) ranks_.push_back({.name = rank});
}

std::vector<SlowRanks::News> SlowRanks::step(std::uint64_t step, std::span<const double> seconds) {
  if (seconds.size() != ranks_.size())
    throw UsageError("{} times for {} ranks: give one for each", seconds.size(), ranks_.size());
  std::vector<News> news;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    if (!known(seconds[i])) continue;
    std::vector<double> others;
    for (std::size_t j = 0; j < ranks_.size(); ++j)
      if (j != i && known(seconds[j])) others.push_back(seconds[j]);
    if (others.empty()) continue;

    Rank& rank = ranks_[i];
    rank.sum.seconds += seconds[i];
    rank.sum.others += lower_median(std::move(others));
    ++rank.num_summed;
    if (rank.sum.others < least_seconds) continue;
    const Sample sample{rank.sum.seconds / rank.num_summed, rank.sum.others / rank.num_summed};
    rank.sum = {};
    rank.num_summed = 0;
    if (rank.samples.size() < num_steps) {
      rank.samples.push_back(sample);
    } else {
      rank.samples[rank.next] = sample;
      rank.next = (rank.next + 1) % num_steps;
    }
    if (rank.samples.size() < num_steps) continue;

    std::vector<Sample> ordered = rank.samples;
    std::sort(ordered.begin(), ordered.end(), [](const Sample& a, const Sample& b) {
      return a.seconds * b.others < b.seconds * a.others;
    });
    const auto ratio_of = [](const Sample& each) { return each.seconds / each.others; };
    const Sample& middle = ordered[num_steps / 2];
    const double ratio = ratio_of(middle);
    const bool turns_slow = !rank.slow && ratio_of(ordered[num_steps / 3]) >= options_.slow &&
                            middle.seconds - middle.others >= options_.worth_seconds;
    const bool turns_well = rank.slow && ratio < options_.well;
    if (!turns_slow && !turns_well) continue;
    rank.slow = turns_slow;
    news.push_back({.kind = turns_slow ? News::Kind::slow : News::Kind::well_again,
                    .rank = rank.name,
                    .ratio = ratio,
                    .seconds = middle.seconds,
                    .others_seconds = middle.others,
                    .step = step});
  }
  return news;
}

std::vector<int> SlowRanks::slow() const {
  std::vector<int> ranks;
  for (const Rank& rank : ranks_)
    if (rank.slow) ranks.push_back(rank.name);
  return ranks;
}

}  // namespace lockstep::observe
