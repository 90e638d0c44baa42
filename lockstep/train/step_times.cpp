#include <lockstep/train/step_times.h>

#include <utility>

#include <c10/core/impl/VirtualGuardImpl.h>

namespace lockstep::train {

namespace {

std::chrono::steady_clock::time_point time_on(c10::Device device) {
  if (device.is_cuda()) {
    const c10::impl::VirtualGuardImpl guard(device.type());
    guard.synchronizeStream(guard.getStream(device));
  }
  return std::chrono::steady_clock::now();
}

}  // namespace

PartClock::PartClock(c10::Device device) : device_(device), since_(time_on(device)) {}

void PartClock::add_to(double& part) {
  const auto now = time_on(device_);
  part += std::chrono::duration<double>(now - std::exchange(since_, now)).count();
}

}  // namespace lockstep::train
