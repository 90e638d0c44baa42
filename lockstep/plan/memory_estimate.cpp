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
    // The weights that are stepped on.
    if (offloads)
      estimate_.host_optimizer += stepped_on * kFloat;
    else if (is_narrow())
      estimate_.optimizer += stepped_on * kFloat;
  }

  bool moves_matrices() const { return options_.step_kind == optim::StepKind::whole_matrices; }
  std::int64_t state_bytes_of(const ModelSizes::Parameter& parameter) const {
    return moves_matrices() && parameter.matrix_rows > 0 ? options_.matrix_state_bytes
                                                         : options_.state_bytes;
  }

  // The optimizer's state on the rank that has most of it: parts of units are equally long, but
  // elements of matrices may have less state than others.
  std::int64_t state_bytes() const {
    std::vector<std::int64_t> of_ranks(cuts_optimizer_ ? static_cast<std::size_t>(num_parts_) : 1);
    std::vector<std::int64_t> begins(model_.units.size());
    for (const ModelSizes::Parameter& parameter : model_.parameters) {
      const Unit& unit = model_.units[parameter.unit];
      std::int64_t& begin = begins[parameter.unit];
      const std::int64_t end = begin + parameter.num_elements;
      const std::int64_t length = cuts_optimizer_ ? part(unit) : unit.num_elements;
      for (; unit.trained && begin < end;) {
        const std::int64_t rank = begin / length;
        const std::int64_t next = std::min(end, (rank + 1) * length);
        of_ranks[static_cast<std::size_t>(rank)] += (next - begin) * state_bytes_of(parameter);
        begin = next;
      }
      begin = end;
    }
    return std::ranges::max(of_ranks);
  }

  // What a step has beside the state while it lasts.
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

  // What a checkpoint holds: of weights in 16 bits those that the optimizer steps on.
  std::int64_t saved_bytes() const {
    std::int64_t bytes = model_.buffer_bytes;
    for (const ModelSizes::Parameter& parameter : model_.parameters) {
      const Unit& unit = model_.units[parameter.unit];
      bytes += parameter.num_elements *
               (summed_bytes(unit) + (unit.trained ? state_bytes_of(parameter) : 0));
    }
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
    return rest + std::max(most, std::max(trace_.peak_bytes_after, estimate_.step) + gradients);
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
