// A port for somebody else to listen on.
#pragma once

#include <string>

namespace lockstep::elastic {

// A port of this host that nothing listens on and that the kernel does not hand out by itself.
int free_port(const std::string& host);

}  // namespace lockstep::elastic
