#include <lockstep/comm/engines/engines.h>

#include <algorithm>
#include <array>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#ifdef LOCKSTEP_HAVE_GLOO
#include <lockstep/comm/engines/gloo_communicator.h>
#endif
#ifdef LOCKSTEP_HAVE_MPI
#include <lockstep/comm/engines/mpi_communicator.h>
#endif

namespace lockstep::comm::engines {

namespace {

using Make = std::shared_ptr<Communicator> (*)(const GroupInfo&, const EngineOptions&);

struct Known {
  const char* name;
  bool is_built;
  Make make;          // null where it makes no communicators of its own
  const char* needs;  // how to get it
};

#ifdef LOCKSTEP_HAVE_GLOO
constexpr Known kGloo{"gloo", true, &make_gloo, ""};
#else
constexpr Known kGloo{
    "gloo", false, nullptr,
    "a LibTorch with c10d's Gloo and Gloo's headers (Debian: libtorch-dev and libgloo-dev)"};
#endif
#ifdef LOCKSTEP_HAVE_MPI
constexpr Known kMpi{"mpi", true, &make_mpi, ""};
#else
constexpr Known kMpi{"mpi", false, nullptr,
                     "Open MPI with its headers (Debian: libopenmpi-dev and openmpi-bin)"};
#endif
#ifdef LOCKSTEP_HAVE_NCCL
constexpr Known kNccl{"nccl", true, nullptr, ""};
#else
constexpr Known kNccl{"nccl", false, nullptr,
                      "a LibTorch built for CUDA, and nccl.h (give LibTorch's CMake folder as "
                      "Torch_DIR)"};
#endif
constexpr std::array<Known, 3> kEngines{kGloo, kMpi, kNccl};

[[noreturn]] void fail_without(const std::string& name) {
  if (const auto needs = needed_for(name))
    throw UsageError("the engine '{}' is not in this build (there is: {}); it needs {}: install "
                     "that and build Lockstep again",
                     name, fmt::join(available_engines(), ", "), *needs);
  throw UsageError("there is no engine '{}'; this build has: {}", name,
                   fmt::join(available_engines(), ", "));
}

}  // namespace

std::vector<std::string> available_engines() {
  std::vector<std::string> names;
  for (const Known& engine : kEngines)
    if (engine.is_built) names.emplace_back(engine.name);
  return names;
}

bool has_engine(const std::string& name) {
  return std::ranges::any_of(
      kEngines, [&](const Known& engine) { return engine.is_built && name == engine.name; });
}

std::optional<std::string> needed_for(const std::string& name) {
  for (const Known& engine : kEngines)
    if (name == engine.name && !engine.is_built) return engine.needs;
  return std::nullopt;
}

std::shared_ptr<Communicator> make_engine(const std::string& name, const GroupInfo& group,
                                          const EngineOptions& options) {
  for (const Known& engine : kEngines)
    if (name == engine.name && engine.make != nullptr) return engine.make(group, options);
  fail_without(name);
}

#ifndef LOCKSTEP_HAVE_NCCL
MakeLane nccl_lanes(c10::Device) { fail_without("nccl"); }
void try_nccl(const Deadline&) { fail_without("nccl"); }
std::string gpu_identity(c10::Device) { return ""; }
#endif

}  // namespace lockstep::comm::engines
