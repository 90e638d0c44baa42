// Half of a pair of memory fences, for a flag that is set rarely and looked at often, across
// processes: who sets it pays for a full fence in every thread that looks, and those pay nothing.
#pragma once

namespace lockstep::comm {

// Makes this process one of those that heavy_fence() reaches. False where the kernel cannot: then
// both sides need a full fence of their own.
bool take_part_in_heavy_fences();

// Every running thread of every process that takes part, and this one, passes a full fence. Costs
// some microseconds.
void heavy_fence();

}  // namespace lockstep::comm
