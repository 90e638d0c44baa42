// What an engine says, for our messages.
#pragma once

#include <string>

namespace lockstep::comm::engines {

// Without the addresses of stack frames that LibTorch's exceptions carry.
inline std::string engine_text(const std::string& what) {
  return what.substr(0, what.find("\nException raised from"));
}

}  // namespace lockstep::comm::engines
