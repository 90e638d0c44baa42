#include <lockstep/models/spec/training_step.h>

#include <utility>

#include <lockstep/base/error.h>
#include <lockstep/base/even_share.h>
#include <lockstep/models/spec/family.h>

namespace lockstep::models {

namespace {

void check_step(const LanguageModelStep& step) {
  if (step.micro_batch < 1 || step.sequence_length < 1)
    throw UsageError("a micro-batch of {} sequences of {} tokens: give at least one of each",
                     step.micro_batch, step.sequence_length);
  if (!(step.recomputed_blocks >= 0 && step.recomputed_blocks <= 1))
    throw UsageError("the share of blocks to recompute is {}: give a number from 0 to 1",
                     step.recomputed_blocks);
}

plan::Kernels kernels_of(const LanguageModelStep& step) {
  if (step.device == plan::Device::gpu) return plan::Kernels::gpu;
  return step.precision == plan::Precision::fp32 ? plan::Kernels::cpu : plan::Kernels::libtorch;
}

}  // namespace

std::vector<TapeBlock> tape_blocks(plan::Layers& layers, std::int64_t num_layers,
                                   const std::function<TapeBlock()>& make) {
  std::vector<TapeBlock> blocks;
  for (std::int64_t i = 0; i < num_layers; ++i) {
    layers.begin_block(static_cast<std::size_t>(i));
    blocks.push_back(make());
  }
  layers.end_blocks();
  return blocks;
}

plan::Tape::Value through_blocks(plan::Layers& layers, const std::vector<TapeBlock>& blocks,
                                 plan::Tape::Value x, double recomputed_blocks) {
  for (std::size_t i = 0; i < blocks.size(); ++i)
    x = is_in_share(i, blocks.size(), recomputed_blocks) ? layers.tape().recompute(blocks[i], x)
                                                         : blocks[i](x);
  return x;
}

DescribedModel describe(const ModelConfig& given, const LanguageModelStep& step) {
  const ModelConfig config = resolved(given);
  const Family& family = family_named(config.family);
  check_step(step);
  plan::Layers layers({.num_tokens = step.micro_batch * step.sequence_length,
                       .element_bytes = plan::bytes_of(step.precision),
                       .kernels = kernels_of(step)});
  // The tokens, and the target after each.
  const plan::Tape::Value batch = layers.tape().input(2 * layers.num_tokens() * 8);
  plan::Tape::Value loss = family.loss(layers, config, step);
  DescribedModel described;
  described.trace = layers.tape().backward(std::move(loss));
  described.sizes = layers.sizes();
  // All layers share a table of angles.
  if (family.rotary)
    described.sizes.buffer_bytes = step.sequence_length * config.head_dim * plan::kFloat;
  return described;
}

}  // namespace lockstep::models
