#include <lockstep/comm/engines/engines.h>

#include <array>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#ifdef LOCKSTEP_HAVE_GLOO
#include <lockstep/comm/engines/gloo_communicator.h>
#endif
#ifdef LOCKSTEP_HAVE_MPI
#include <lockstep/comm/engines/mpi_communicator.h>
#endif
#ifdef LOCKSTEP_HAVE_NCCL
#include <lockstep/comm/engines/nccl_communicator.h>
#endif

namespace lockstep::comm::engines {

namespace {

using Make = std::shared_ptr<Communicator> (*)(const GroupInfo&, const EngineOptions&);

struct Known {
  const char* name;
  Make make;          // null where this build lacks the engine
  const char* needs;  // how to get it
};

constexpr std::array<Known, 3> kEngines{{
    {"gloo",
#ifdef LOCKSTEP_HAVE_GLOO
     &make_gloo,
#else
     nullptr,
#endif
     "a LibTorch with c10d's Gloo and Gloo's headers (Debian: libtorch-dev and libgloo-dev)"},
    {"mpi",
#ifdef LOCKSTEP_HAVE_MPI
     &make_mpi,
#else
     nullptr,
#endif
     "Open MPI with its headers (Debian: libopenmpi-dev and openmpi-bin)"},
    {"nccl",
#ifdef LOCKSTEP_HAVE_NCCL
     &make_nccl,
#else
     nullptr,
#endif
     "a LibTorch 2.1 or newer built for CUDA, and nccl.h (give its CMake folder as Torch_DIR)"},
}};

}  // namespace

std::vector<std::string> available_engines() {
  std::vector<std::string> names;
  for (const Known& engine : kEngines)
    if (engine.make != nullptr) names.emplace_back(engine.name);
  return names;
}

std::optional<std::string> needed_for(const std::string& name) {
  for (const Known& engine : kEngines)
    if (name == engine.name && engine.make == nullptr) return engine.needs;
  return std::nullopt;
}

std::shared_ptr<Communicator> make_engine(const std::string& name, const GroupInfo& group,
                                          const EngineOptions& options) {
  for (const Known& engine : kEngines)
    if (name == engine.name && engine.make != nullptr) return engine.make(group, options);
  if (const auto needs = needed_for(name))
    throw UsageError("the engine '{}' is not in this build (there is: {}); it needs {}: install "
                     "that and build Lockstep again",
                     name, fmt::join(available_engines(), ", "), *needs);
  throw UsageError("there is no engine '{}'; this build has: {}", name,
                   fmt::join(available_engines(), ", "));
}

}  // namespace lockstep::comm::engines
