// `lockstep check`: what this machine can do.
#include <torch/version.h>

#include <lockstep/base/error.h>
#include <lockstep/comm/world.h>
#include <lockstep/device/device_manager.h>

#include <cli/flags.h>

namespace lockstep::cli {

int check(Arguments arguments) {
  CLI::App app("Tells what this machine can do.", "lockstep check");
  if (!parse_flags(app, {arguments.begin(), arguments.end()})) return 0;

  const auto manager = device::DeviceManager::auto_detect();
  std::string backends;
  for (const std::string& name : comm::available_backends()) backends += " " + name;
  fmt::print("LibTorch  {}\ndevice    {} ({})\ncores     {}\nbackends {}\n", TORCH_VERSION,
             manager.device().str(), manager.name(), manager.num_cores(), backends);
  return 0;
}

}  // namespace lockstep::cli
