#include <lockstep/plan/memory_estimate.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include <lockstep/base/error.h>
#include <lockstep/parallel/shard/sizes/unit_sizes.h>
#include <lockstep/plan/model_sizes.h>

namespace lockstep::plan {

namespace {

// Whether a unit is moved between ranks, and its bytes when it is whole on a rank.
struct MovedUnit {
  bool moved = false;
  std::int64_t bytes = 0;
};

// The first step learns the order in which units are used; the second already follows it.
constexpr int kSteps = 2;

struct Itself {
  std::int64_t operator()(std::int64_t bytes) const { return bytes; }
};

// shard::BufferPool without buffers.
class Pool {
 public:
  explicit Pool(std::int64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  // Returns the bytes of the buffer that it gave, which may be larger.
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

// The most bytes that shard::ParameterGatherer holds for units that are gathered when they are
// used.
std::int64_t peak_of_gathered(const ModelSizes& model, const StepTrace& trace,
                              std::span<const MovedUnit> units, std::int64_t max_live_units,
                              std::int64_t limit_bytes) {
  struct Event {
    StepTrace::Kind kind;
    std::size_t unit;
  };
  // The events of units that are moved, without a second use in a row of the same unit.
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

// The most bytes that shard::GradientSharder holds for gradients that are collected or on their
// way.
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

void check(const MemoryOptions& options) {
  if (options.num_ranks < 1)
    throw UsageError("the number of ranks is {}: give at least 1", options.num_ranks);
  if (options.ranks_per_copy < 0 ||
      (options.ranks_per_copy > 0 && options.num_ranks % options.ranks_per_copy != 0))
    throw UsageError("{} ranks do not divide into groups of {} that hold a copy of the model each: "
                     "give a number that {} is a multiple of",
                     options.num_ranks, options.ranks_per_copy, options.num_ranks);
  if (options.copied_shares < 0)
    throw UsageError("{} copies of a rank's share of a checkpoint: give at least 0",
                     options.copied_shares);
  if (options.max_live_units < 1 || options.accumulation < 1 || options.state_bytes < 0 ||
      options.matrix_state_bytes < 0)
    throw UsageError("max_live_units is {}, the accumulated micro-batches are {} and the "
                     "optimizer's bytes for each parameter {}, and {} in matrices: give at least "
                     "1, 1, 0 and 0",
                     options.max_live_units, options.accumulation, options.state_bytes,
                     options.matrix_state_bytes);
  if (can_offload(options.strategy, options.offload)) return;
  if (options.offload == Offload::optimizer)
    throw UsageError("the optimizer is offloaded where gradients are cut, and {} does not cut "
                     "them: choose {}",
                     name_of(options.strategy), strategies_that_cut(ShardedState::gradients));
  throw UsageError("parameters are offloaded where they are cut, and {} does not cut them: choose "
                   "{}, or offload the optimizer alone",
                   name_of(options.strategy), strategies_that_cut(ShardedState::parameters));
}

// One model under one strategy.
class Accountant {
 public:
  Accountant(const ModelSizes& model, const StepTrace& trace, const MemoryOptions& options)
      : model_(model), trace_(trace), options_(options) {
    cuts_parameters_ = cuts_parameters(options.strategy);
    cuts_gradients_ = cuts_gradients(options.strategy);
    cuts_optimizer_ = cuts_optimizer(options.strategy);
    adds_passes_ = options.accumulation > 1 &&
                   exchanges_each_pass(options.exchange_gradients, options.strategy);
    num_parts_ = has_copies(options.strategy) && options.ranks_per_copy > 0 ? options.ranks_per_copy
                                                                            : options.num_ranks;
    std::vector<std::int64_t> sizes;
    for (const Unit& unit : model.units) sizes.push_back(unit.num_elements);
    if (!cuts_parameters_)
      resident_.assign(sizes.size(), true);
    else if (options.offload == Offload::optimizer_and_parameters)
      resident_ = shard::small_units(sizes, num_parts_);
    else
      resident_ = shard::choose_residents(sizes, num_parts_);
  }

  MemoryEstimate estimate() {
    for (std::size_t i = 0; i < model_.units.size(); ++i) add_unit(i);
    (options_.offload == Offload::none ? estimate_.optimizer : estimate_.host_optimizer) +=
        state_bytes();
    add_step();
    estimate_.buffers = model_.buffer_bytes;
    (on_gpu() ? estimate_.host_copies : estimate_.copies) =
        options_.copied_shares * saved_bytes() / options_.num_ranks;
    estimate_.activations = trace_.peak_bytes();
    if (cuts_parameters_) estimate_.gathered = gathered();
    if (cuts_gradients_) estimate_.gradients_on_their_way = on_their_way();
    estimate_.peak = peak();
    return estimate_;
  }

 private:
  using Unit = ModelSizes::Unit;

  // Whether ranks send each other parameters in 16 bits. Where parameters are whole on every rank,
  // autocast computes in 16 bits without that.
  bool is_narrow() const { return cuts_gradients_ && options_.precision != Precision::fp32; }
  bool on_gpu() const { return options_.device == Device::gpu; }
  bool uses_autocast() const {
    return on_gpu() && !cuts_gradients_ && options_.precision != Precision::fp32;
  }
  // Bytes of an element that operators read: CPUs have no fast product of 16 bits.
  std::int64_t computed_bytes(const Unit& unit) const {
    return is_narrow() && on_gpu() ? bytes_of(options_.precision) : unit.element_bytes;
  }
  // Bytes of an element that a rank sends.
  std::int64_t sent_bytes(const Unit& unit) const {
    return is_narrow() ? bytes_of(options_.precision) : unit.element_bytes;
  }
  // Whether the optimizer steps on 16 bits.
  bool has_narrow_masters() const { return is_narrow() && options_.narrow_masters; }
  // Bytes of an element of the weights that the optimizer steps on, and of their gradients.
  std::int64_t master_bytes(const Unit& unit) const {
    return has_narrow_masters() ? bytes_of(options_.precision) : summed_bytes(unit);
  }
  // Bytes of an element of a gradient that a rank sums over its own passes.
  std::int64_t own_passes_bytes(const Unit& unit) const {
    return has_narrow_masters() && on_gpu() ? bytes_of(options_.precision) : summed_bytes(unit);
  }
  // Bytes of an element of a gradient that is summed over ranks: never 16 bits.
  std::int64_t summed_bytes(const Unit& unit) const {
    return is_narrow() ? kFloat : unit.element_bytes;
  }
  std::int64_t part(const Unit& unit) const {
    return shard::part_size(unit.num_elements, num_parts_);
  }
  std::int64_t padded(const Unit& unit) const {
    return cuts_optimizer_ ? part(unit) * num_parts_ : unit.num_elements;
  }

  void add_unit(std::size_t index) {
    const Unit& unit = model_.units[index];
    const bool offloads = options_.offload != Offload::none;
    if (resident_[index]) {
      estimate_.weights += padded(unit) * computed_bytes(unit);
      // A rank sends a part of the weights it computes with, unless the two have different types.
      if (sent_bytes(unit) != computed_bytes(unit))
        estimate_.weights += part(unit) * sent_bytes(unit);
    } else {
      (options_.offload == Offload::optimizer_and_parameters ? estimate_.host_weights
                                                             : estimate_.weights) +=
          part(unit) * sent_bytes(unit);
    }
    // Autocast makes copies of the weights in a pass.
    if (uses_autocast()) estimate_.weights += unit.num_elements * bytes_of(options_.precision);
    if (!unit.trained) return;
    if (cuts_gradients_)
      (offloads ? estimate_.host_optimizer : estimate_.gradients) +=
          part(unit) * master_bytes(unit);
    if (!cuts_gradients_ || keeps_own_passes())
      estimate_.gradients += unit.num_elements * own_passes_bytes(unit);
    // The sums of the passes before, while another one runs.
    if (!cuts_gradients_ && adds_passes_)
      estimate_.gradients += unit.num_elements * summed_bytes(unit);
    const std::int64_t stepped_on =
        cuts_optimizer_ ? std::min(part(unit), unit.num_elements) : unit.num_elements;
    // The weights that are stepped on.
    if (offloads)
      estimate_.host_optimizer += stepped_on * (has_narrow_masters() ? master_bytes(unit) : kFloat);
    else if (is_narrow() && !has_narrow_masters())
      estimate_.optimizer += stepped_on * kFloat;
  }

  // Whether a rank keeps the whole gradients of its own passes until the last of a step.
  bool keeps_own_passes() const { return options_.accumulation > 1 && !adds_passes_; }

  bool moves_matrices() const { return options_.step_kind == optim::StepKind::whole_matrices; }
  double state_bytes_of(const ModelSizes::Parameter& parameter) const {
    const double bytes = moves_matrices() && parameter.matrix_rows > 0 ? options_.matrix_state_bytes
                                                                       : options_.state_bytes;
    return has_narrow_masters() && options_.narrow_states ? bytes / 2 : bytes;
  }

  // The optimizer's state on the rank that has most of it: parts of units are equally long, but
  // elements of matrices may have less state than others.
  std::int64_t state_bytes() const {
    std::vector<double> of_ranks(cuts_optimizer_ ? static_cast<std::size_t>(num_parts_) : 1);
    std::vector<std::int64_t> begins(model_.units.size());
    for (const ModelSizes::Parameter& parameter : model_.parameters) {
      const Unit& unit = model_.units[parameter.unit];
      std::int64_t& begin = begins[parameter.unit];
      const std::int64_t end = begin + parameter.num_elements;
      const std::int64_t length = cuts_optimizer_ ? part(unit) : unit.num_elements;
      for (; unit.trained && begin < end;) {
        const std::int64_t rank = begin / length;
        const std::int64_t next = std::min(end, (rank + 1) * length);
        of_ranks[static_cast<std::size_t>(rank)] +=
            static_cast<double>(next - begin) * state_bytes_of(parameter);
        begin = next;
      }
      begin = end;
    }
    return std::llround(std::ranges::max(of_ranks));
  }

  // The memory that a step takes beside the state while it lasts.
  void add_step() {
    const bool offloads = options_.offload != Offload::none;
    if (options_.step_kind == optim::StepKind::norm_per_parameter)
      (offloads ? estimate_.host_optimizer : estimate_.step) += directions();
    if (moves_matrices()) estimate_.step += matrices();
  }

  // The directions of a unit's parts; of whole parameters up to optim::kMostTogether elements.
  std::int64_t directions() const {
    std::int64_t most = 0, together = 0;
    std::vector<std::int64_t> largest(model_.units.size());  // parameter of each unit
    for (const ModelSizes::Parameter& parameter : model_.parameters) {
      const Unit& unit = model_.units[parameter.unit];
      if (!unit.trained) continue;
      largest[parameter.unit] = std::max(largest[parameter.unit], parameter.num_elements);
      if (cuts_optimizer_) continue;
      if (together + parameter.num_elements > optim::kMostTogether) together = 0;
      together += parameter.num_elements;
      most = std::max(most, (together + scratch(parameter.num_elements)) * summed_bytes(unit));
    }
    for (std::size_t i = 0; cuts_optimizer_ && i < model_.units.size(); ++i) {
      const Unit& unit = model_.units[i];
      const std::int64_t mine = std::min(part(unit), unit.num_elements);
      if (unit.trained)
        most = std::max(most, (mine + scratch(std::min(mine, largest[i]))) * summed_bytes(unit));
    }
    return most;
  }
  // LibTorch's operators on a GPU have one more tensor of a parameter's size.
  std::int64_t scratch(std::int64_t elements) const {
    return on_gpu() && options_.offload == Offload::none ? elements : 0;
  }

  // The matrix that a rank computes: itself and what becomes of it, and two squares of its smaller
  // side. Where parameters are cut, the parts of as many matrices as there are ranks, which are
  // about as much as a matrix.
  std::int64_t matrices() const {
    std::int64_t most = 0;
    for (const ModelSizes::Parameter& parameter : model_.parameters) {
      const Unit& unit = model_.units[parameter.unit];
      if (!unit.trained || parameter.matrix_rows == 0) continue;
      const std::int64_t side =
          std::min(parameter.matrix_rows, parameter.num_elements / parameter.matrix_rows);
      const std::int64_t copies = cuts_optimizer_ && num_parts_ > 1 ? 3 : 2;
      most =
          std::max(most, (copies * parameter.num_elements + 2 * side * side) * summed_bytes(unit));
    }
    return most;
  }

  // Bytes of a checkpoint, which holds the weights that the optimizer steps on.
  std::int64_t saved_bytes() const {
    auto bytes = static_cast<double>(model_.buffer_bytes);
    for (const ModelSizes::Parameter& parameter : model_.parameters) {
      const Unit& unit = model_.units[parameter.unit];
      const double of_state = options_.saved_state_bytes.value_or(state_bytes_of(parameter));
      bytes += static_cast<double>(parameter.num_elements) *
               (static_cast<double>(master_bytes(unit)) + (unit.trained ? of_state : 0));
    }
    return std::llround(bytes);
  }

  std::int64_t gathered() const {
    std::vector<MovedUnit> units;
    std::int64_t largest = 0;
    for (std::size_t i = 0; i < model_.units.size(); ++i) {
      const Unit& unit = model_.units[i];
      units.push_back({.moved = !resident_[i], .bytes = padded(unit) * computed_bytes(unit)});
      largest = std::max(largest, unit.num_elements * computed_bytes(unit));
    }
    const std::int64_t peak = peak_of_gathered(model_, trace_, units, options_.max_live_units,
                                               options_.max_live_units * largest);
    // A copy of the model in each node, cut among its ranks, from the first gather of a step on.
    std::int64_t in_node = 0;
    if (options_.ranks_per_node > 1)
      for (const MovedUnit& unit : units)
        if (unit.moved) in_node += unit.bytes / options_.ranks_per_node;
    // On a CPU a unit arrives in 16 bits, and is then converted to fp32.
    const std::int64_t wider =
        is_narrow() && !on_gpu() ? largest / kFloat * bytes_of(options_.precision) : 0;
    return peak + wider + in_node;
  }

  std::int64_t on_their_way() const {
    std::vector<MovedUnit> units;
    std::int64_t largest = 0;
    for (const Unit& unit : model_.units) {
      units.push_back({.moved = unit.trained, .bytes = padded(unit) * summed_bytes(unit)});
      largest = std::max(largest, units.back().bytes);
    }
    // A rank's parts of the sums that arrive to be added to those of the passes before, or to be
    // rounded.
    const std::int64_t arriving =
        adds_passes_ || has_narrow_masters()
            ? static_cast<std::int64_t>(shard::kGradientsInFlight) * largest / num_parts_
            : 0;
    return peak_of_gradients(model_, trace_, units, shard::kGradientBuffers * largest) + arriving;
  }

  // Walks through a step: some memory is there all the time, and gradients are added as they come.
  std::int64_t peak() const {
    std::int64_t whole_gradients = 0;
    for (const Unit& unit : model_.units)
      if (unit.trained) whole_gradients += unit.num_elements * own_passes_bytes(unit);
    const bool stay_whole = !cuts_gradients_;
    // Gradients of the micro-batch before are there, or buckets hold all gradients.
    const bool there_from_the_start =
        keeps_own_passes() || (stay_whole && options_.device == Device::gpu);
    const std::int64_t rest = estimate_.weights + estimate_.optimizer + estimate_.buffers +
                              estimate_.copies + estimate_.gathered +
                              estimate_.gradients_on_their_way + estimate_.gradients -
                              (stay_whole || keeps_own_passes() ? whole_gradients : 0);
    std::int64_t gradients = there_from_the_start ? whole_gradients : 0;
    std::int64_t most = 0;
    for (const StepTrace::Event& event : trace_.events) {
      most = std::max(most, event.peak_bytes + gradients);
      if (event.kind != StepTrace::Kind::gradient || !stay_whole || there_from_the_start) continue;
      const ModelSizes::Parameter& parameter = model_.parameters[event.parameter];
      gradients += parameter.num_elements * summed_bytes(model_.units[parameter.unit]);
    }
    return rest + std::max(most, std::max(trace_.peak_bytes_after, estimate_.step) + gradients);
  }

  const ModelSizes& model_;
  const StepTrace& trace_;
  const MemoryOptions& options_;
  bool cuts_parameters_ = false;
  bool cuts_gradients_ = false;
  bool cuts_optimizer_ = false;
  bool adds_passes_ = false;  // each to sums over all ranks
  int num_parts_ = 1;
  std::vector<bool> resident_;
  MemoryEstimate estimate_;
};

}  // namespace

bool can_offload(ShardingStrategy strategy, Offload offload) {
  if (offload == Offload::none || cuts_parameters(strategy)) return true;
  return offload == Offload::optimizer && cuts_gradients(strategy);
}

MemoryEstimate estimate_memory(const ModelSizes& model, const StepTrace& trace,
                               const MemoryOptions& options) {
  check(options);
  return Accountant(model, trace, options).estimate();
}

}  // namespace lockstep::plan
