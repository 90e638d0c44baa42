// Every schedule: a new one is a struct of options that looks like its siblings, and a row here.
#pragma once

#include <lockstep/optim/schedules/deepspeed_schedules.h>

namespace lockstep::optim {

// Calls row(name, options) for each schedule: what configs call it, and the options that it has
// unless others are given.
template <typename Row>
void for_each_schedule(const Row& row) {
  row("WarmupLR", WarmupLR{});
  row("WarmupDecayLR", WarmupDecayLR{});
  row("WarmupCosineLR", WarmupCosineLR{});
  row("OneCycle", OneCycle{});
  row("LRRangeTest", LRRangeTest{});
  row("Constant", Constant{});
}

}  // namespace lockstep::optim
