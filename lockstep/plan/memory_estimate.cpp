#include <lockstep/plan/memory_estimate.h>

#include <algorithm>
#include <vector>

#include <lockstep/base/error.h>
#include <lockstep/parallel/shard/sizes/unit_sizes.h>
#include <lockstep/plan/pooled_units.h>

namespace lockstep::plan {

namespace {

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
  if (options.max_live_units < 1 || options.accumulation < 1 || options.state_bytes < 0)
    throw UsageError("max_live_units is {}, the accumulated micro-batches are {} and the "
                     "optimizer's bytes for each parameter {}: give at least 1, 1 and 0",
                     options.max_live_units, options.accumulation, options.state_bytes);
  if (can_offload(options.strategy, options.offload)) return;
  if (options.offload == Offload::optimizer)
    throw UsageError("the optimizer is offloaded where gradients are cut, and {} does not cut "
                     "them: choose SHARD_GRAD_OP or FULL_SHARD",
                     name_of(options.strategy));
  throw UsageError("parameters are offloaded where they are cut, and {} does not cut them: choose "
                   "FULL_SHARD, or offload the optimizer alone",
                   name_of(options.strategy));
}

// One model under one strategy.
class Accountant {
 public:
  Accountant(const ModelSizes& model, const StepTrace& trace, const MemoryOptions& options)
      : model_(model), trace_(trace), options_(options) {
    using enum ShardingStrategy;
    cuts_parameters_ = options.strategy == FULL_SHARD || options.strategy == HYBRID_SHARD;
    cuts_gradients_ = cuts_parameters_ || options.strategy == SHARD_GRAD_OP;
    cuts_optimizer_ = cuts_gradients_ || options.strategy == SHARD_OPTIMIZER;
    num_parts_ = options.strategy == HYBRID_SHARD && options.ranks_per_copy > 0
                     ? options.ranks_per_copy
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

  // Whether ranks send each other parameters of 16 bits: where they are whole on every rank,
  // autocast does without.
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
  // Of a gradient that is summed over ranks or over passes: never in 16 bits.
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
      // What is sent is a part of it, unless that has another type.
      if (sent_bytes(unit) != computed_bytes(unit))
        estimate_.weights += part(unit) * sent_bytes(unit);
    } else {
      (options_.offload == Offload::optimizer_and_parameters ? estimate_.host_weights
                                                             : estimate_.weights) +=
          part(unit) * sent_bytes(unit);
    }
    // The copies that it makes in a pass.
    if (uses_autocast()) estimate_.weights += unit.num_elements * bytes_of(options_.precision);
    if (!unit.trained) return;
    if (cuts_gradients_)
      (offloads ? estimate_.host_optimizer : estimate_.gradients) +=
          part(unit) * summed_bytes(unit);
    if (!cuts_gradients_ || options_.accumulation > 1)
      estimate_.gradients += unit.num_elements * summed_bytes(unit);
    const std::int64_t stepped_on =
        cuts_optimizer_ ? std::min(part(unit), unit.num_elements) : unit.num_elements;
    if (!offloads)
      estimate_.optimizer += stepped_on * (options_.state_bytes + (is_narrow() ? kFloat : 0));
    else
      estimate_.host_optimizer += stepped_on * (options_.state_bytes + kFloat);
  }

  // What a checkpoint holds: of weights in 16 bits those that the optimizer steps on.
  std::int64_t saved_bytes() const {
    std::int64_t bytes = model_.buffer_bytes;
    for (const Unit& unit : model_.units)
      bytes += unit.num_elements * (summed_bytes(unit) + (unit.trained ? options_.state_bytes : 0));
    return bytes;
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
    // On a CPU a unit comes in 16 bits, and is made wider then.
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
    return peak_of_gradients(model_, trace_, units, shard::kGradientBuffers * largest);
  }

  // Walks through a step with what is there all the time, and gradients as they come.
  std::int64_t peak() const {
    std::int64_t whole_gradients = 0;
    for (const Unit& unit : model_.units)
      if (unit.trained) whole_gradients += unit.num_elements * summed_bytes(unit);
    const bool stay_whole = !cuts_gradients_;
    // Of the micro-batch before, or in buckets.
    const bool there_from_the_start =
        options_.accumulation > 1 || (stay_whole && options_.device == Device::gpu);
    const std::int64_t rest = estimate_.weights + estimate_.optimizer + estimate_.buffers +
                              estimate_.copies + estimate_.gathered +
                              estimate_.gradients_on_their_way + estimate_.gradients -
                              (stay_whole || options_.accumulation > 1 ? whole_gradients : 0);
    std::int64_t gradients = there_from_the_start ? whole_gradients : 0;
    std::int64_t most = 0;
    for (const StepTrace::Event& event : trace_.events) {
      most = std::max(most, event.peak_bytes + gradients);
      if (event.kind != StepTrace::Kind::gradient || !stay_whole || there_from_the_start) continue;
      const ModelSizes::Parameter& parameter = model_.parameters[event.parameter];
      gradients += parameter.num_elements * summed_bytes(model_.units[parameter.unit]);
    }
    return rest + std::max(most, trace_.peak_bytes_after + gradients);
  }

  const ModelSizes& model_;
  const StepTrace& trace_;
  const MemoryOptions& options_;
  bool cuts_parameters_ = false;
  bool cuts_gradients_ = false;
  bool cuts_optimizer_ = false;
  int num_parts_ = 1;
  std::vector<bool> resident_;
  MemoryEstimate estimate_;
};

}  // namespace

const char* name_of(ShardingStrategy strategy) {
  switch (strategy) {
    case ShardingStrategy::NO_SHARD: return "NO_SHARD";
    case ShardingStrategy::SHARD_OPTIMIZER: return "SHARD_OPTIMIZER";
    case ShardingStrategy::SHARD_GRAD_OP: return "SHARD_GRAD_OP";
    case ShardingStrategy::FULL_SHARD: return "FULL_SHARD";
    case ShardingStrategy::HYBRID_SHARD: return "HYBRID_SHARD";
  }
  return "unknown";
}

bool can_offload(ShardingStrategy strategy, Offload offload) {
  using enum ShardingStrategy;
  if (offload == Offload::none || strategy == FULL_SHARD || strategy == HYBRID_SHARD) return true;
  return offload == Offload::optimizer && strategy == SHARD_GRAD_OP;
}

MemoryEstimate estimate_memory(const ModelSizes& model, const StepTrace& trace,
                               const MemoryOptions& options) {
  check(options);
  return Accountant(model, trace, options).estimate();
}

}  // namespace lockstep::plan
