// The memory that a training step of a language model takes, without making the model.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include <lockstep/models/spec/config.h>
#include <lockstep/plan/layers.h>
#include <lockstep/plan/model_sizes.h>
#include <lockstep/plan/precision.h>

namespace lockstep::models {

struct LanguageModelStep {
  std::int64_t micro_batch = 1;      // sequences
  std::int64_t sequence_length = 0;  // tokens of each
  double recomputed_blocks = 0;      // activation_checkpointing.ratio
  plan::Precision precision = plan::Precision::fp32;
  plan::Device device = plan::Device::cpu;
};

struct DescribedModel {
  plan::ModelSizes sizes;
  plan::StepTrace trace;
};

// Describes the model that make_model(config) would make, and what it would do to memory in a step
// of training. UsageError for a config or a step that makes no sense.
DescribedModel describe(const ModelConfig& config, const LanguageModelStep& step);

// For a family's own description (Family::loss). A block is a function of the output of the layers
// before it; backward calls recomputed blocks again.
using TapeBlock = std::function<plan::Tape::Value(const plan::Tape::Value&)>;
// Calls `make` for each block; the parameters that it registers are the block's.
std::vector<TapeBlock> tape_blocks(plan::Layers& layers, std::int64_t num_layers,
                                   const std::function<TapeBlock()>& make);
plan::Tape::Value through_blocks(plan::Layers& layers, const std::vector<TapeBlock>& blocks,
                                 plan::Tape::Value x, double recomputed_blocks);

}  // namespace lockstep::models
