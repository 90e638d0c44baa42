// The groups of this process: what has to end with a generation of the job.
#pragma once

#include <memory>
#include <string>

#include <lockstep/comm/communicator.h>

namespace lockstep::comm {

// Every group that join_world() or split() made is there until nobody has it any more. Any thread.
void note_open_group(const std::shared_ptr<Communicator>& group);

// Aborts all that are there, and those that are made later, as somebody may be about to: whoever
// waits in a call of one is thrown out of it. Any thread.
void abort_open_groups(const std::string& reason);

// Communicator::check_device_results of all of them. Any thread.
void check_device_results();

// From here on groups are of the next generation, and stay.
void admit_groups();

}  // namespace lockstep::comm
