// What of a sharded model's state waits in the host's memory instead of the device's.
#pragma once

namespace lockstep::shard {

// The update of what is there runs on the host's cores; only what operators need comes to the
// device.
struct CPUOffload {
  // The optimizer's state, the part that it steps on, and that part's gradient.
  bool offload_optimizer = false;
  // What a rank sends of its parameters, too. Needs the optimizer's there, and sharded parameters.
  bool offload_params = false;
};

// UsageError where they do not go together.
void check(const CPUOffload& offload);

}  // namespace lockstep::shard
