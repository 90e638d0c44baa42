// GPT and Llama in numbers: what they take, without making one.
#pragma once

#include <cstdint>

#include <lockstep/models/config.h>
#include <lockstep/plan/device.h>
#include <lockstep/plan/model_sizes.h>
#include <lockstep/plan/precision.h>
#include <lockstep/plan/step_trace.h>

namespace lockstep::plan {

struct LanguageModelStep {
  std::int64_t micro_batch = 1;      // sequences
  std::int64_t sequence_length = 0;  // tokens of each
  double recomputed_blocks = 0;      // activation_checkpointing.ratio
  Precision precision = Precision::fp32;
  Device device = Device::cpu;
};

struct DescribedModel {
  ModelSizes sizes;
  StepTrace trace;
};

// What models::make_model(config) would be, and do in a step of training. UsageError for a config
// or a step of no sense.
DescribedModel describe(const models::ModelConfig& config, const LanguageModelStep& step);

}  // namespace lockstep::plan
