#include <lockstep/base/host_identity.h>

#include <sys/stat.h>

#include <fstream>

#include <spdlog/fmt/fmt.h>

namespace lockstep {

std::string host_identity() {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  struct stat network {};
  ::stat("/proc/self/ns/net", &network);
  return fmt::format("{}/{}", boot, network.st_ino);
}

}  // namespace lockstep
