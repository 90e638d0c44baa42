#include <lockstep/train/config/names.h>
#include <lockstep/train/config/sections.h>

#include <lockstep/base/error.h>

namespace lockstep::train {

namespace {

constexpr std::int64_t kMostRanksOfANode = 1 << 24;

void read_device(JsonSection& offload, OffloadDevice& device) {
  if (const JsonNode* node = offload.find("device");
      node != nullptr && node->text() != nullptr && *node->text() == "nvme")
    offload.mistake("device", "is \"nvme\", but nothing is offloaded to disks here: take \"cpu\", "
                              "the host's memory, or \"none\"");
  else
    offload.choice("device", device, kOffloadDevices);
}

// What the section was before it was one.
void read_old_name(JsonSection& zero, std::string_view key, std::string_view section,
                   OffloadDevice& device) {
  bool offloads = false;
  if (!zero.boolean(key, offloads) || !offloads) return;
  JsonSection now = zero.section(section);
  if (now.find("device") != nullptr && device == OffloadDevice::none && !now.has_mistake("device"))
    zero.mistake(key,
                 fmt::format("is true, but {} is \"none\": set one of them", now.path("device")));
  device = OffloadDevice::cpu;
}

constexpr const char* kCutParameters =
    "take \"FULL_SHARD\" (zero_optimization.stage 3) or \"HYBRID_SHARD\"";
constexpr const char* kCutGradients =
    "take \"SHARD_GRAD_OP\" (zero_optimization.stage 2), \"FULL_SHARD\" (3) or \"HYBRID_SHARD\"";

}  // namespace

void read_offload(JsonSection& zero, ShardingSection& sharding) {
  JsonSection optimizer = zero.section("offload_optimizer");
  JsonSection param = zero.section("offload_param");
  read_device(optimizer, sharding.offload_optimizer);
  read_device(param, sharding.offload_param);
  read_old_name(zero, "cpu_offload", "offload_optimizer", sharding.offload_optimizer);
  read_old_name(zero, "cpu_offload_param", "offload_param", sharding.offload_param);

  const std::string_view strategy = name_of(sharding.strategy, kShardings);
  if (sharding.offload_optimizer == OffloadDevice::cpu && !cuts_gradients(sharding.strategy))
    optimizer.mistake("device",
                      fmt::format("is \"cpu\", but with the sharding_strategy \"{}\" gradients are "
                                  "whole on every rank's device: {}, or set it to \"none\"",
                                  strategy, kCutGradients));
  if (sharding.offload_param != OffloadDevice::cpu) return;
  if (!cuts_parameters(sharding.strategy)) {
    // Parameters are whole on every rank's device, in DeepSpeed as well.
    zero.has_no_effect("offload_param");
    sharding.offload_param = OffloadDevice::none;
  } else if (!optimizer.has_mistake("device")) {
    // An optimizer elsewhere would bring the parameters back for every step.
    if (sharding.offload_optimizer == OffloadDevice::none && optimizer.find("device") != nullptr)
      optimizer.has_no_effect("device");
    sharding.offload_optimizer = OffloadDevice::cpu;
  }
}

void read_zero_plus_plus(JsonSection& zero, ShardingSection& sharding) {
  ZeroPlusPlusSection& section = sharding.zero_plus_plus;
  zero.boolean("zero_quantized_weights", section.quantized_weights);
  zero.boolean("zero_quantized_gradients", section.quantized_gradients);
  zero.integer("zero_hpz_partition_size", section.hpz_partition_size, 1, kMostRanksOfANode);

  const auto refuse = [&](const char* key, const std::string& value, const char* what,
                          const char* instead) {
    zero.mistake(key, fmt::format("is {}, but with the sharding_strategy \"{}\" {}: {}, or remove "
                                  "it",
                                  value, name_of(sharding.strategy, kShardings), what, instead));
  };
  constexpr const char* kWhole = "parameters are whole on every rank";
  if (!cuts_parameters(sharding.strategy)) {
    if (section.quantized_weights) refuse("zero_quantized_weights", "true", kWhole, kCutParameters);
    if (section.hpz_partition_size > 1)
      refuse("zero_hpz_partition_size", std::to_string(section.hpz_partition_size), kWhole,
             kCutParameters);
  }
  if (section.quantized_gradients && !cuts_gradients(sharding.strategy))
    refuse("zero_quantized_gradients", "true", "gradients are whole on every rank", kCutGradients);
}

}  // namespace lockstep::train
