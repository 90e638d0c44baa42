#include <lockstep/train/preflight/memory_fit.h>

#include <algorithm>
#include <bit>
#include <new>
#include <numeric>
#include <string_view>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/plan/text.h>
#include <lockstep/train/config/batch.h>

namespace lockstep::train {

namespace {

constexpr double kTight = 0.9;

// How many copies of a rank's share of a checkpoint the host's memory holds. Data on another device
// is copied there for any checkpoint.
int copied_shares(const CheckpointSection& checkpoint, int num_ranks, plan::Device device) {
  const bool saves_beside = checkpoint.asynchronous && checkpoint.interval > 0;
  int shares = saves_beside || device == plan::Device::gpu ? plan::kSharesOfSave : 0;
  if (checkpoint.memory_interval > 0) shares += plan::shares_of_peer_copies(num_ranks);
  return shares;
}

// "weights 26.1 GiB, gradients 26.1 GiB, …", without what is nothing.
std::string parts_text(const plan::MemoryEstimate& estimate) {
  std::string text;
  const auto add = [&](const char* what, std::int64_t bytes) {
    if (bytes > 0)
      text += fmt::format("{}{} {}", text.empty() ? "" : ", ", what,
                          plan::bytes_text(static_cast<double>(bytes)));
  };
  add("weights", estimate.weights);
  add("gradients", estimate.gradients);
  add("optimizer", estimate.optimizer);
  add("units in flight", estimate.gathered + estimate.gradients_on_their_way);
  add("activations", estimate.activations);
  add("the optimizer's step", estimate.step);
  add("copies for checkpoints", estimate.copies);
  return text;
}

// Strategies that leave less on a rank, or let the host have it, the least change first.
std::vector<ShardingStrategy> cuts_beyond(const RunMemory::Choice& choice, plan::Offload offload) {
  std::vector<ShardingStrategy> further;
  // One rank has no other to leave anything to.
  if (choice.num_ranks == 1 && offload == plan::Offload::none) return further;
  const StrategyTraits& now = traits_of(choice.strategy);
  for (const StrategyTraits& row : kStrategies)
    if (!row.has_copies && (row.cut > now.cut || (row.cut == now.cut && now.has_copies)) &&
        plan::can_offload(row.strategy, offload))
      further.push_back(row.strategy);
  return further;
}

// The changed choices, in the config's words.
std::string difference_text(const RunMemory::Choice& from, const RunMemory::Choice& to) {
  std::vector<std::string> parts;
  if (to.strategy != from.strategy)
    parts.push_back(fmt::format("sharding_strategy \"{}\"", name_of(to.strategy)));
  if (to.recomputed_blocks != from.recomputed_blocks)
    parts.push_back(fmt::format("activation_checkpointing.ratio {}", to.recomputed_blocks));
  if (to.micro_batch != from.micro_batch)
    parts.push_back(
        fmt::format("train_micro_batch_size_per_gpu {} with {} gradient_accumulation_steps",
                    to.micro_batch, to.accumulation));
  if (to.offload != from.offload)
    parts.emplace_back("zero_optimization.offload_optimizer.device \"cpu\"");
  if (to.num_ranks != from.num_ranks) parts.push_back(fmt::format("{} ranks", to.num_ranks));
  return fmt::format("{}", fmt::join(parts, " and "));
}

}  // namespace

Fit fit(std::int64_t peak_bytes, std::int64_t there_bytes) {
  if (peak_bytes > there_bytes) return Fit::not_at_all;
  return static_cast<double>(peak_bytes) > kTight * static_cast<double>(there_bytes) ? Fit::tightly
                                                                                     : Fit::well;
}

plan::Offload offload_of(const TrainConfig& config) {
  if (config.sharding.offload_param == OffloadDevice::cpu)
    return plan::Offload::optimizer_and_parameters;
  return config.sharding.offload_optimizer == OffloadDevice::cpu ? plan::Offload::optimizer
                                                                 : plan::Offload::none;
}

RunMemory::RunMemory(TrainConfig config, models::ModelConfig model, plan::Device device)
    : RunMemory(config, model, device, config.precision.compute, offload_of(config)) {}

RunMemory::RunMemory(TrainConfig config, models::ModelConfig model, plan::Device device,
                     plan::Precision precision, plan::Offload offload)
    : config_(std::move(config)),
      model_(models::resolved(model)),
      device_(device),
      precision_(precision),
      offload_(device == plan::Device::cpu ? plan::Offload::none : offload) {
  const ParallelSection& parallel = config_.parallel;
  if (parallel.ranks_together() > 1)
    throw UsageError(
        "parallel has tensor {}, pipeline {} and context {}, and what ranks that share "
        "a model take in memory is not known here: leave them out to see what data "
        "parallelism takes (--set parallel.tensor=1 and so on)",
        parallel.tensor, parallel.pipeline, parallel.context);
}

RunMemory::Choice RunMemory::configured(int num_ranks, int ranks_per_host,
                                        const std::optional<BegunBatch>& begun) const {
  const Batch batch = resolve_batch(config_, num_ranks, begun);
  const ShardingStrategy strategy = config_.sharding.strategy;
  const auto divides = [&](const char* key, std::int64_t size) {
    if (size > 1 && num_ranks % size != 0)
      throw UsageError("{} is {}, and {} ranks do not divide into groups of so many: give a number "
                       "that {} is a multiple of",
                       key, size, num_ranks, num_ranks);
  };
  divides("fsdp.ranks_per_copy", config_.sharding.ranks_per_copy);
  divides("zero_optimization.zero_hpz_partition_size",
          config_.sharding.zero_plus_plus.hpz_partition_size);
  return {.strategy = strategy,
          .num_ranks = num_ranks,
          .ranks_per_host = ranks_per_host,
          .micro_batch = batch.micro,
          .accumulation = batch.accumulation,
          .recomputed_blocks = config_.recomputed_blocks,
          .offload = plan::can_offload(strategy, offload_) ? offload_ : plan::Offload::none};
}

const models::DescribedModel& RunMemory::described(const Choice& choice) {
  const std::pair key(choice.micro_batch, choice.recomputed_blocks);
  const auto found = described_.find(key);
  if (found != described_.end()) return found->second;
  return described_[key] = models::describe(
             model_,
             {.micro_batch = choice.micro_batch,
              .sequence_length = config_.data.sequence_length,
              .recomputed_blocks = choice.recomputed_blocks,
              .precision = device_ == plan::Device::cpu ? plan::Precision::fp32 : precision_,
              .device = device_});
}

plan::MemoryEstimate RunMemory::estimate(const Choice& choice) {
  const auto& [sizes, trace] = described(choice);
  const bool cuts = cuts_parameters(choice.strategy);
  int ranks_per_copy = static_cast<int>(config_.sharding.ranks_per_copy);
  if (ranks_per_copy == 0) ranks_per_copy = choice.ranks_per_host;
  // Where the ranks do not divide into groups of this size, the size becomes one that divides them.
  if (ranks_per_copy > 0) ranks_per_copy = std::gcd(ranks_per_copy, choice.num_ranks);
  return plan::estimate_memory(
      sizes, trace,
      {.strategy = choice.strategy,
       .num_ranks = choice.num_ranks,
       .ranks_per_copy = ranks_per_copy,
       .precision = precision_,
       .offload = choice.offload,
       .narrow_masters = config_.precision.narrow_masters,
       .narrow_states = config_.precision.narrow_states,
       .state_bytes = config_.optimizer.options.state_bytes(),
       .step_kind = config_.optimizer.options.kind(),
       .matrix_state_bytes = config_.optimizer.options.matrix_state_bytes(),
       .saved_state_bytes = config_.optimizer.options.saved_state_bytes(),
       .max_live_units = config_.sharding.max_live_units,
       .accumulation = choice.accumulation,
       .exchange_gradients = config_.exchange_gradients,
       .ranks_per_node =
           cuts ? static_cast<int>(config_.sharding.zero_plus_plus.hpz_partition_size) : 0,
       .copied_shares = copied_shares(config_.checkpoint, choice.num_ranks, device_),
       .device = device_});
}

std::vector<std::string> RunMemory::ways_to_fit(const Choice& choice, const MemoryThere& there) {
  std::vector<std::string> ways;
  const auto offer = [&](const Choice& other) {
    const plan::MemoryEstimate taken = estimate(other);
    if (taken.peak > there.for_each_rank() || !there.has_room_on_host(taken)) return false;
    ways.push_back(fmt::format("{} ({})", difference_text(choice, other),
                               plan::bytes_text(static_cast<double>(taken.peak))));
    return true;
  };
  // One change, then two of them, and so on; nothing that has more of them than were enough.
  constexpr unsigned kCut = 1, kRecompute = 2, kSmallBatch = 4, kOffload = 8;
  std::vector<unsigned> orders(16);
  std::iota(orders.begin(), orders.end(), 0u);
  std::ranges::stable_sort(orders, {}, [](unsigned changes) { return std::popcount(changes); });
  std::vector<unsigned> enough;
  for (const unsigned changes : orders) {
    if (std::ranges::any_of(enough, [&](unsigned less) { return (changes & less) == less; }))
      continue;
    Choice other = choice;
    if ((changes & kRecompute) != 0) other.recomputed_blocks = 1;
    if ((changes & kSmallBatch) != 0) {
      other.micro_batch = 1;
      other.accumulation = choice.accumulation * choice.micro_batch;
    }
    if ((changes & kOffload) != 0) {
      if (device_ == plan::Device::cpu || choice.offload != plan::Offload::none) continue;
      other.offload = plan::Offload::optimizer;
    }
    if ((changes & kCut) == 0) {
      if (other != choice && plan::can_offload(other.strategy, other.offload) && offer(other))
        enough.push_back(changes);
      continue;
    }
    for (const ShardingStrategy strategy : cuts_beyond(choice, other.offload)) {
      other.strategy = strategy;
      if (!offer(other)) continue;
      enough.push_back(changes);
      break;
    }
  }
  // More ranks on one host have less of its memory each.
  if (!ways.empty() || there.num_ranks_sharing > 1) return ways;
  constexpr int kMostRanks = 1 << 16;
  for (const double recomputed : {choice.recomputed_blocks, 1.0}) {
    Choice many = choice;
    many.strategy = ShardingStrategy::FULL_SHARD;
    many.recomputed_blocks = recomputed;
    for (many.num_ranks = 2; many.num_ranks <= kMostRanks; many.num_ranks *= 2)
      if (many.num_ranks > choice.num_ranks && offer(many)) return ways;
  }
  return ways;
}

bool MemoryThere::has_room_on_host(const plan::MemoryEstimate& estimate) const {
  return host_bytes == 0 || estimate.host() <= host_bytes / num_ranks_on_host;
}

std::string judge_memory(RunMemory& memory, const RunMemory::Choice& choice,
                         const MemoryThere& there) {
  if (there.bytes == 0) return "";  // nobody knows
  const plan::MemoryEstimate estimate = memory.estimate(choice);
  if (!there.has_room_on_host(estimate))
    throw UsageError(
        "the model has {:.3g} parameters, and each of this host's {} ranks keeps {} in its memory "
        "(what is offloaded {}, copies for checkpoints {}), but the host has {}. Spread the ranks "
        "over more hosts, take zero_optimization.offload_optimizer and offload_param away where "
        "devices have room, leave checkpoint.memory_interval at 0, or make the model smaller",
        static_cast<double>(models::num_parameters(memory.model())), there.num_ranks_on_host,
        plan::bytes_text(static_cast<double>(estimate.host())),
        plan::bytes_text(static_cast<double>(estimate.host_weights + estimate.host_optimizer)),
        plan::bytes_text(static_cast<double>(estimate.host_copies)),
        plan::bytes_text(static_cast<double>(there.host_bytes)));
  const Fit fits = fit(estimate.peak, there.for_each_rank());
  if (fits == Fit::well) return "";
  const std::string ranks = choice.num_ranks == 1
                                ? std::string("one rank")
                                : fmt::format("each of {} ranks", choice.num_ranks);
  const std::string has = fmt::format(
      "{} has {}{}", there.what, plan::bytes_text(static_cast<double>(there.bytes)),
      there.num_ranks_sharing == 1 ? "" : fmt::format(" for {} of them", there.num_ranks_sharing));
  if (fits == Fit::tightly)
    return fmt::format("this will fit tightly: a step takes {} on {}, and {}",
                       plan::bytes_text(static_cast<double>(estimate.peak)), ranks, has);
  const std::vector<std::string> ways = memory.ways_to_fit(choice, there);
  RunMemory::Choice alone = choice;
  alone.num_ranks = 1;
  const bool fits_alone = there.num_ranks_sharing > 1 && memory.estimate(alone).peak <= there.bytes;
  throw UsageError(
      "the model has {:.3g} parameters, and a step with {} takes {} on {} ({}), but {}. {} "
      "model.hidden_size (it is {}) or model.num_layers (it is {}) smaller{}. 'lockstep plan "
      "memory' shows every strategy",
      static_cast<double>(models::num_parameters(memory.model())), name_of(choice.strategy),
      plan::bytes_text(static_cast<double>(estimate.peak)), ranks, parts_text(estimate), has,
      ways.empty() ? "No other way of training this model fits there: make"
                   : fmt::format("What would fit: {}. Otherwise make", fmt::join(ways, "; or ")),
      memory.model().hidden_size, memory.model().num_layers,
      fits_alone ? ", or start fewer ranks here" : "");
}

bool is_out_of_memory(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return true;
  // LibTorch has an exception class for GPUs only, and not in every version.
  const std::string_view text = error.what();
  for (const std::string_view sign :
       {"out of memory", "can't allocate memory", "not enough memory"})
    if (text.find(sign) != text.npos) return true;
  return false;
}

std::string out_of_memory_advice(const TrainConfig& config, const std::exception& error) {
  // LibTorch appends a stack trace after the first line.
  const std::string_view text = error.what();
  const std::string what(text.substr(0, text.find('\n')));
  return fmt::format(
      "out of memory: {}. Try a smaller train_micro_batch_size_per_gpu (with as many more "
      "gradient_accumulation_steps the result is the same), a shorter data.sequence_length (it is "
      "{}), {}{}or a smaller model",
      what, config.data.sequence_length,
      config.recomputed_blocks < 1 ? "activation_checkpointing.ratio 1, " : "",
      cuts_parameters(config.sharding.strategy)
          ? ""
          : "the sharding_strategy \"FULL_SHARD\" on several ranks, ");
}

}  // namespace lockstep::train
