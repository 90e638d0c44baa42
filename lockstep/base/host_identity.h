// Which host this process is on.
#pragma once

#include <string>

namespace lockstep {

// A text that names the host, its boot and its network: processes with equal ones can share memory
// and reach each other's abstract sockets.
std::string host_identity();

}  // namespace lockstep
