#include <limits>

#include <lockstep/base/error.h>
#include <lockstep/train/config/names.h>
#include <lockstep/train/config/sections.h>

namespace lockstep::train {

namespace {

// DeepSpeed's switches for weights, gradients and optimizer state that have 16 bits themselves.
constexpr std::string_view kNoMasters[] = {
    "fp16_master_weights_and_grads", "bf16_master_weights_and_grads", "bf16_optimizer_states"};

void refuse_without_masters(JsonSection& section) {
  for (const std::string_view key : kNoMasters)
    if (const JsonNode* node = section.foreign(key); node != nullptr && !node->asks_for_nothing())
      section.mistake(key,
                      fmt::format("is {}, but what the optimizer steps on is always fp32 here: "
                                  "remove it",
                                  node->quoted()));
}

bool read_bf16(JsonSection& top, std::string_view name) {
  JsonSection section = top.section(name);
  bool enabled = false;
  section.boolean("enabled", enabled);
  bool checked = true;
  if (section.boolean("check_grad_overflow", checked) && !checked)
    section.mistake("check_grad_overflow",
                    "is false, but gradients are always looked at: on_non_finite_loss says what "
                    "becomes of a step where one is infinite or not a number; remove it");
  constexpr std::string_view settings[] = {"immediate_grad_update"};
  section.allow(settings);
  refuse_without_masters(section);
  return enabled;
}

bool read_fp16(JsonSection& top, optim::LossScaleOptions& scale) {
  JsonSection section = top.section("fp16");
  bool enabled = false;
  section.boolean("enabled", enabled);
  constexpr double kLargest = std::numeric_limits<float>::max();
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  section.number("loss_scale", scale.loss_scale, {.lowest = 0, .highest = kLargest});
  std::int64_t power = scale.initial_scale_power;
  section.integer("initial_scale_power", power, 0, std::numeric_limits<float>::max_exponent - 1);
  scale.initial_scale_power = static_cast<int>(power);
  section.integer("loss_scale_window", scale.loss_scale_window, 1, kMost);
  section.integer("hysteresis", scale.hysteresis, 1, kMost);
  section.boolean("consecutive_hysteresis", scale.consecutive_hysteresis);
  section.number("min_loss_scale", scale.min_loss_scale,
                 {.lowest = 0, .highest = kLargest, .above_lowest = true});
  // Whether a model's inputs are cast: those here are whole numbers.
  constexpr std::string_view settings[] = {"auto_cast"};
  section.allow(settings);
  refuse_without_masters(section);
  // What is in range by itself and does not go together.
  if (enabled && section.sound({"loss_scale", "initial_scale_power", "min_loss_scale"})) {
    try {
      const optim::LossScale whole(scale);
    } catch (const UsageError& error) {
      section.mistake("min_loss_scale", fmt::format("does not fit the others: {}", error.what()));
    }
  }
  return enabled;
}

}  // namespace

void read_precision(JsonSection& top, Sharding strategy, PrecisionSection& precision) {
  const bool fp16 = read_fp16(top, precision.loss_scale);
  const bool bf16 = read_bf16(top, "bf16");
  const bool bfloat16 = read_bf16(top, "bfloat16");
  if (fp16 && (bf16 || bfloat16))
    top.mistake(bf16 ? "bf16.enabled" : "bfloat16.enabled",
                "is true, and so is fp16.enabled: a run has one of them");
  if (fp16) precision.compute = Precision::fp16;
  if (bf16 || bfloat16) precision.compute = Precision::bf16;

  if (top.choice("communication_data_type", precision.gradients, kPrecisions) &&
      precision.gradients != Precision::fp32 && !cuts_gradients(strategy) &&
      top.sound(kStrategyKeys))
    top.mistake(
        "communication_data_type",
        fmt::format("is \"{}\", but with the sharding_strategy \"{}\" gradients travel in "
                    "fp32: take \"SHARD_GRAD_OP\" (zero_optimization.stage 2), "
                    "\"FULL_SHARD\" (3) or \"HYBRID_SHARD\", or remove it",
                    name_of(precision.gradients, kPrecisions), name_of(strategy, kShardings)));
}

}  // namespace lockstep::train
