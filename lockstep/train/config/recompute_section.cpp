#include <lockstep/train/config/sections.h>

#include <lockstep/base/error.h>

namespace lockstep::train {

void read_recompute(JsonSection& top, double& recomputed_blocks) {
  JsonSection section = top.section("activation_checkpointing");
  section.number("ratio", recomputed_blocks, {.lowest = 0, .highest = 1});
  for (const std::string_view key :
       {"partition_activations", "cpu_checkpointing", "contiguous_memory_optimization",
        "number_checkpoints", "synchronize_checkpoint_boundary", "profile"})
    if (const JsonNode* node = section.find(key); node != nullptr && !node->asks_for_nothing())
      section.mistake(key, fmt::format("is {}, which this build cannot do: remove it, and say with "
                                       "ratio which share of the blocks backward computes again",
                                       node->quoted()));
}

}  // namespace lockstep::train
