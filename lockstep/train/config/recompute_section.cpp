#include <lockstep/train/config/sections.h>

#include <lockstep/base/error.h>

namespace lockstep::train {

void read_recompute(JsonSection& top, double& recomputed_blocks) {
  JsonSection section = top.section("activation_checkpointing");
  section.number("ratio", recomputed_blocks, {.lowest = 0, .highest = 1});
}

}  // namespace lockstep::train
