#include <lockstep/plan/pooled_units.h>

#include <algorithm>
#include <deque>

#include <lockstep/parallel/shard/sizes/unit_sizes.h>

namespace lockstep::plan {

namespace {

// In the first step an order is learned, and in the second it is what it stays.
constexpr int kSteps = 2;

struct Itself {
  std::int64_t operator()(std::int64_t bytes) const { return bytes; }
};

// shard::BufferPool without buffers.
class Pool {
 public:
  explicit Pool(std::int64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  // Returns the bytes of what it gave, which may be more.
  std::int64_t take(std::int64_t bytes) {
    if (const auto found = idle_.take(bytes)) return *found;
    held_ -= idle_.free(held_ + bytes - limit_bytes_);
    held_ += bytes;
    peak_ = std::max(peak_, held_);
    return bytes;
  }
  void give_back(std::int64_t bytes) {
    idle_.add(bytes);
    held_ -= idle_.free(held_ - limit_bytes_);
  }

  std::int64_t peak() const { return peak_; }

 private:
  std::int64_t limit_bytes_;
  shard::IdleBuffers<std::int64_t, Itself> idle_;
  std::int64_t held_ = 0;
  std::int64_t peak_ = 0;
};

// How many parameters of each unit get a gradient.
std::vector<std::size_t> count_gradients(const ModelSizes& model, const StepTrace& trace) {
  std::vector<std::size_t> counts(model.units.size());
  for (const StepTrace::Event& event : trace.events)
    if (event.kind == StepTrace::Kind::gradient) ++counts[model.parameters[event.parameter].unit];
  return counts;
}

// Units that are there, least recently used first.
class LiveUnits {
 public:
  LiveUnits(std::span<const MovedUnit> units, std::int64_t most, std::int64_t limit_bytes)
      : units_(units), most_(static_cast<std::size_t>(most)), pool_(limit_bytes) {}

  void use(std::size_t unit) {
    gather(unit);
    const auto place = std::ranges::find(live_, unit, &Live::unit);
    std::rotate(place, place + 1, live_.end());
  }
  // While another one is in use.
  void prefetch(std::size_t unit) {
    if (most_ > 1) gather(unit);
  }
  void release(std::size_t unit) {
    const auto place = std::ranges::find(live_, unit, &Live::unit);
    if (place == live_.end()) return;
    pool_.give_back(place->bytes);
    live_.erase(place);
  }
  void release_all() {
    while (!live_.empty()) release(live_.front().unit);
  }

  std::int64_t peak_bytes() const { return pool_.peak(); }

 private:
  struct Live {
    std::size_t unit;
    std::int64_t bytes;
  };

  void gather(std::size_t unit) {
    if (std::ranges::find(live_, unit, &Live::unit) != live_.end()) return;
    while (live_.size() >= most_) release(live_.front().unit);
    live_.push_back({unit, pool_.take(units_[unit].bytes)});
  }

  std::span<const MovedUnit> units_;
  std::size_t most_;
  Pool pool_;
  std::vector<Live> live_;
};

}  // namespace

std::int64_t peak_of_gathered(const ModelSizes& model, const StepTrace& trace,
                              std::span<const MovedUnit> units, std::int64_t max_live_units,
                              std::int64_t limit_bytes) {
  struct Event {
    StepTrace::Kind kind;
    std::size_t unit;
  };
  // Of units that are moved, without uses of one that was in use already.
  std::vector<Event> events;
  for (const StepTrace::Event& event : trace.events) {
    const std::size_t unit = model.parameters[event.parameter].unit;
    const bool again = event.kind == StepTrace::Kind::use && !events.empty() &&
                       events.back().kind == StepTrace::Kind::use && events.back().unit == unit;
    if (units[unit].moved && !again) events.push_back({event.kind, unit});
  }
  const auto next_use = [&](std::size_t after) {
    return std::find_if(events.begin() + static_cast<std::ptrdiff_t>(after), events.end(),
                        [](const Event& event) { return event.kind == StepTrace::Kind::use; });
  };

  LiveUnits live(units, max_live_units, limit_bytes);
  for (int step = 0; step < kSteps; ++step) {
    const bool knows_order = step > 0;
    std::vector<std::size_t> pending = count_gradients(model, trace);
    if (const auto first = next_use(0); knows_order && first != events.end())
      live.prefetch(first->unit);
    for (std::size_t i = 0; i < events.size(); ++i) {
      const auto [kind, unit] = events[i];
      if (kind == StepTrace::Kind::use) {
        live.use(unit);
        if (const auto next = next_use(i + 1); knows_order && next != events.end())
          live.prefetch(next->unit);
      } else if (--pending[unit] == 0) {
        live.release(unit);
      }
    }
    live.release_all();
  }
  return live.peak_bytes();
}

std::int64_t peak_of_gradients(const ModelSizes& model, const StepTrace& trace,
                               std::span<const MovedUnit> units, std::int64_t limit_bytes) {
  Pool pool(limit_bytes);
  for (int step = 0; step < kSteps; ++step) {
    std::vector<std::size_t> pending = count_gradients(model, trace);
    std::vector<std::int64_t> collected(units.size());
    std::deque<std::size_t> in_flight;
    const auto settle_oldest = [&] {
      pool.give_back(collected[in_flight.front()]);
      in_flight.pop_front();
    };
    for (const StepTrace::Event& event : trace.events) {
      const std::size_t unit = model.parameters[event.parameter].unit;
      if (event.kind != StepTrace::Kind::gradient || !units[unit].moved) continue;
      if (collected[unit] == 0) {
        while (in_flight.size() >= shard::kGradientsInFlight) settle_oldest();
        collected[unit] = pool.take(units[unit].bytes);
      }
      if (--pending[unit] == 0) in_flight.push_back(unit);
    }
    while (!in_flight.empty()) settle_oldest();
  }
  return pool.peak();
}

}  // namespace lockstep::plan
