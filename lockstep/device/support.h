// An answer with its reason.
#pragma once

#include <string>

namespace lockstep::device {

// Whether something works on this device, and why (not): measured, so the reason has the figures.
struct Support {
  bool yes = false;
  std::string reason;

  explicit operator bool() const { return yes; }
};

}  // namespace lockstep::device
