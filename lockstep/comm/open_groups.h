// The open groups of this process, which have to end with a generation of the job.
#pragma once

#include <memory>
#include <string>

#include <lockstep/comm/communicator.h>

namespace lockstep::comm {

// Notes a group that join_world() or split() made; it counts as open until it is destroyed. Any
// thread may call it.
void note_open_group(const std::shared_ptr<Communicator>& group);

// Aborts all open groups, and every group that is made later, because another thread may be about
// to make one. Threads that wait in a call of these groups throw. Any thread may call it.
void abort_open_groups(const std::string& reason);

// Calls Communicator::check_device_results() of all open groups. Any thread may call it.
void check_device_results();

// Stops aborting new groups: from here on they belong to the next generation.
void admit_groups();

}  // namespace lockstep::comm
