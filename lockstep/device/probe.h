// Tries out number formats on a device instead of believing its data sheet.
#pragma once

#include <c10/core/Device.h>

#include <lockstep/device/support.h>

namespace lockstep::device {

// Multiplies matrices in the format and in fp32: no where it throws, gives wrong numbers, or takes
// more than twice fp32's time. Takes milliseconds where the format works, and leaves the random
// generators alone. Never throws: what goes wrong is the reason.
Support probe_bf16(c10::Device device);
Support probe_fp8(c10::Device device);

}  // namespace lockstep::device
