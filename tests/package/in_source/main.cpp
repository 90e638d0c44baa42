// Uses one part of Lockstep.
#include <cstdio>

#ifdef WITH_LIBTORCH
#include <lockstep/device/device_manager.h>
#endif
#include <lockstep/base/error.h>

int main() {
#ifdef WITH_LIBTORCH
  std::printf("%s\n", lockstep::device::DeviceManager::auto_detect().device().str().c_str());
#endif
  try {
    throw lockstep::UsageError("{} ranks", 3);
  } catch (const lockstep::UsageError& error) {
    std::printf("%s\n", error.what());
    return 0;
  }
}
