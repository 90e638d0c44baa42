#include <lockstep/comm/world/backends.h>

#include <algorithm>
#include <mutex>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/comm/backends/engine/engine_group.h>
#include <lockstep/comm/backends/native/transport_communicator.h>
#ifdef LOCKSTEP_HAVE_GLOO
#include <lockstep/comm/backends/gloo/gloo.h>
#endif
#ifdef LOCKSTEP_HAVE_MPI
#include <lockstep/comm/backends/mpi/mpi.h>
#endif
#ifdef LOCKSTEP_HAVE_NCCL
#include <lockstep/comm/backends/nccl/nccl_lane.h>
#endif

namespace lockstep::comm {

namespace {

MakeGroup over(Media media) {
  return [media](const GroupInfo& group, const GroupOptions& options) {
    return backends::make_transport_communicator(options.endpoint, group, options.group_id,
                                                 options.addresses,
                                                 {.media = media,
                                                  .algorithm = options.algorithm,
                                                  .timeout = options.timeout,
                                                  .lane = options.lane});
  };
}

using MakeEngine = std::shared_ptr<Communicator> (*)(const GroupInfo&,
                                                     const backends::EngineOptions&);
[[maybe_unused]] MakeGroup over(MakeEngine make) {
  return [make](const GroupInfo& group, const GroupOptions& options) {
    return make(group, {.store = options.store,
                        .timeout = options.timeout,
                        .bind_address = options.bind_address,
                        .ledger = options.ledger});
  };
}

struct Made {
  std::string name;
  MakeGroup make = nullptr;
  Lanes lanes = {};
};

// How to make those rows of comm/backends/table.cpp that this build contains.
std::vector<Made> made_by_lockstep() {
  return {
      {"shm+tcp", over(Media::automatic)},
      {"shm", over(Media::shared_memory)},
      {"tcp", over(Media::tcp)},
#ifdef LOCKSTEP_HAVE_GLOO
      {"gloo", over(&backends::make_gloo)},
#endif
#ifdef LOCKSTEP_HAVE_MPI
      {"mpi", over(&backends::make_mpi)},
#endif
#ifdef LOCKSTEP_HAVE_NCCL
      {"nccl",
       nullptr,
       {.identity = &backends::gpu_identity,
        .make = &backends::nccl_lanes,
        .try_alone = &backends::try_nccl}},
#endif
  };
}

// Programs add backends to it, as they add rows to the table.
struct Makers {
  std::mutex mutex;
  std::vector<Made> all = made_by_lockstep();
};

Makers& the_makers() {
  static Makers only;
  return only;
}

std::vector<Made> makers() {
  Makers& made = the_makers();
  const std::lock_guard lock(made.mutex);
  return made.all;
}

}  // namespace

void register_backend(Backend backend) {
  const bool is_made = backend.can.makes == backends::Makes::lanes
                           ? backend.lanes.identity && backend.lanes.make && backend.lanes.try_alone
                           : static_cast<bool>(backend.make);
  if (!is_made)
    throw UsageError("nothing makes the backend '{}': give it `make`, or all of `lanes` where it "
                     "makes lanes",
                     backend.can.name);
  Makers& made = the_makers();
  const std::lock_guard lock(made.mutex);
  backends::add(backend.can);
  made.all.push_back(
      {std::move(backend.can.name), std::move(backend.make), std::move(backend.lanes)});
}

std::vector<std::string> available_backends() {
  std::vector<std::string> names{std::string(backends::kAutomatic)};
  for (Made& made : makers()) names.push_back(std::move(made.name));
  return names;
}

void check_backend(const std::string& backend) {
  const auto known = available_backends();
  if (std::ranges::find(known, backend) != known.end()) return;
  if (const auto row = backends::find(backend))
    throw UsageError("the backend '{}' is not in this build; it needs {}: install that and build "
                     "Lockstep again, or choose one of {}",
                     backend, row->needs_to_build, fmt::join(known, ", "));
  throw UsageError("there is no backend '{}': choose one of {}", backend, fmt::join(known, ", "));
}

Backend backend_named(const std::string& name) {
  check_backend(name);
  for (Made& made : makers())
    if (made.name == name)
      return {*backends::find(name), std::move(made.make), std::move(made.lanes)};
  throw UsageError("'{}' is a choice between backends: name one of them", name);
}

std::shared_ptr<Communicator> make_group(const std::string& backend, const GroupInfo& group,
                                         const GroupOptions& options) {
  const Backend chosen = backend_named(backend);
  if (!chosen.make)
    throw UsageError(
        "the backend '{}' carries tensors on GPUs beside another one: give its lane to "
        "the group of that (GroupOptions::lane)",
        backend);
  return chosen.make(group, options);
}

}  // namespace lockstep::comm
