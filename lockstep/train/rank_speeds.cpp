#include <lockstep/train/rank_speeds.h>

#include <algorithm>
#include <map>

#include <lockstep/flight/journal.h>

namespace lockstep::train {

namespace {

// The ranks that do the same work.
std::vector<std::vector<int>> stages_of(const mesh::MeshShape& shape) {
  const bool has_stages =
      std::ranges::find(shape.axes(), "pp", &mesh::Axis::name) != shape.axes().end();
  std::map<int, std::vector<int>> stages;
  for (int rank = 0; rank < shape.world_size(); ++rank)
    stages[has_stages ? shape.coordinate(rank, "pp") : 0].push_back(rank);
  std::vector<std::vector<int>> several;
  for (auto& [stage, ranks] : stages)
    if (ranks.size() > 1) several.push_back(std::move(ranks));
  return several;
}

}  // namespace

RankSpeeds::RankSpeeds(const DistributedManager& dist)
    : world_(dist.world()), ranks_(dist.world()) {
  if (!dist.is_main()) return;
  ranks_of_stages_ = stages_of(dist.mesh().shape());
  for (const std::vector<int>& ranks : ranks_of_stages_) stages_.emplace_back(ranks);
}

void RankSpeeds::begin_step() {
  began_ = std::chrono::steady_clock::now();
  waited_before_ = world_->journal().waited_seconds();
}

std::vector<std::string> RankSpeeds::end_step(std::int64_t step) {
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began_;
  own_seconds_.push_back(took.count() - (world_->journal().waited_seconds() - waited_before_));
  if (own_seconds_.size() < kStepsTogether) return {};
  const auto size = static_cast<std::size_t>(ranks_.size());
  std::vector<double> all(size * kStepsTogether);
  std::ranges::copy(own_seconds_,
                    all.begin() + static_cast<std::ptrdiff_t>(
                                      static_cast<std::size_t>(ranks_.rank()) * kStepsTogether));
  all = ranks_.sum(std::move(all));
  own_seconds_.clear();
  std::vector<std::string> news;
  for (std::size_t stage = 0; stage < stages_.size(); ++stage)
    for (std::size_t i = 0; i < kStepsTogether; ++i) {
      std::vector<double> seconds;
      for (const int rank : ranks_of_stages_[stage])
        seconds.push_back(all[static_cast<std::size_t>(rank) * kStepsTogether + i]);
      const auto number = static_cast<std::uint64_t>(step) - (kStepsTogether - 1 - i);
      for (const auto& one : stages_[stage].step(number, seconds)) news.push_back(one.text());
    }
  return news;
}

}  // namespace lockstep::train
