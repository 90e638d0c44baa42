#include <lockstep/train/config/names.h>
#include <lockstep/train/config/sections.h>

#include <lockstep/base/error.h>

namespace lockstep::train {

namespace {

constexpr std::int64_t kMostRanks = 1 << 24;

constexpr Sharding kStages[] = {Sharding::none, Sharding::optimizer, Sharding::gradients,
                                Sharding::full};

constexpr std::string_view kDependent[] = {
    "offload_optimizer",      "offload_param",          "cpu_offload",
    "cpu_offload_param",      "zero_quantized_weights", "zero_quantized_gradients",
    "zero_hpz_partition_size"};

}  // namespace

void read_sharding(JsonSection& top, ShardingSection& sharding) {
  bool named = top.choice("sharding_strategy", sharding.strategy, kShardings);
  JsonSection parallel = top.section("parallel");
  Sharding in_parallel = sharding.strategy;
  if (parallel.choice("sharding_strategy", in_parallel, kShardings)) {
    if (named && in_parallel != sharding.strategy)
      parallel.mistake(
          "sharding_strategy",
          fmt::format("is \"{}\", but outside of parallel it is \"{}\": set one of them",
                      name_of(in_parallel, kShardings), name_of(sharding.strategy, kShardings)));
    sharding.strategy = in_parallel;
    named = true;
  }
  JsonSection fsdp = top.section("fsdp");
  fsdp.integer("max_live_units", sharding.max_live_units, 1, kMostRanks);
  if (fsdp.integer("ranks_per_copy", sharding.ranks_per_copy, 1, kMostRanks) &&
      sharding.strategy != Sharding::hybrid && top.sound(kStrategyKeys))
    fsdp.mistake("ranks_per_copy",
                 fmt::format("is {}, but only the sharding_strategy \"HYBRID_SHARD\" has several "
                             "copies of the model: set that, or remove it",
                             sharding.ranks_per_copy));

  JsonSection zero = top.section("zero_optimization");
  std::int64_t stage = 0;
  if (zero.integer("stage", stage, 0, 3)) {
    const Sharding asked = kStages[stage];
    const bool agrees = asked == sharding.strategy ||
                        (asked == Sharding::full && sharding.strategy == Sharding::hybrid);
    if (named && !agrees)
      zero.mistake("stage", fmt::format("is {}, but sharding_strategy is \"{}\": set one of them",
                                        stage, name_of(sharding.strategy, kShardings)));
    else if (!named)
      sharding.strategy = asked;
  }
  // What else depends on a strategy that is not known is not judged.
  if (top.sound(kStrategyKeys)) {
    read_offload(zero, sharding);
    read_zero_plus_plus(zero, sharding);
  } else {
    zero.allow(kDependent);
    for (const std::string_view offload : {"offload_optimizer", "offload_param"})
      (void)zero.section(offload).find("device");
  }
}

}  // namespace lockstep::train
