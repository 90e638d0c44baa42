// Where numbers and texts that ranks tell each other have to lie.
#pragma once

#include <c10/core/Device.h>

#include <lockstep/comm/communicator.h>

namespace lockstep::comm {

// On the host where the backend takes that: not every device has float64 (MPS has none), and what
// is told is there anyway. `device` is the rank's.
inline c10::Device message_device(const Communicator& group, c10::Device device) {
  return group.backend() == "nccl" ? device : c10::Device(c10::DeviceType::CPU);
}

}  // namespace lockstep::comm
