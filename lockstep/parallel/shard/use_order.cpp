#include <lockstep/parallel/shard/use_order.h>

#include <algorithm>

namespace lockstep::shard {

namespace {

// A program that only evaluates never ends a step.
constexpr std::size_t kRemembered = 1 << 16;

}  // namespace

std::optional<std::size_t> UseOrder::note(std::size_t unit) {
  if (now_.size() < kRemembered) now_.push_back(unit);
  // Where a step departs from the last one, it is expected to go on from the same unit's next use.
  auto found = std::find(last_.begin() + static_cast<std::ptrdiff_t>(next_), last_.end(), unit);
  if (found == last_.end()) found = std::find(last_.begin(), last_.end(), unit);
  if (found == last_.end()) return {};
  next_ = static_cast<std::size_t>(found - last_.begin()) + 1;
  return next_ < last_.size() ? std::optional(last_[next_]) : std::nullopt;
}

std::optional<std::size_t> UseOrder::start_over() {
  if (!now_.empty()) last_ = std::move(now_);
  now_.clear();
  next_ = 0;
  return last_.empty() ? std::nullopt : std::optional(last_.front());
}

}  // namespace lockstep::shard
