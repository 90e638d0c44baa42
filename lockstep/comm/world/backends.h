// How each backend is made, and how a program adds one of its own. The table
// (comm/backends/table.h) says what a backend can do.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include <lockstep/base/deadline.h>
#include <lockstep/comm/backends/table.h>
#include <lockstep/comm/communicator.h>
#include <lockstep/comm/device_lane.h>
#include <lockstep/comm/transport/link.h>
#include <lockstep/store/store.h>

namespace lockstep::comm {

class Endpoint;

// The options of a group besides its ranks. join_world() fills in all of them.
struct GroupOptions {
  // The job's store, where ranks find each other; null for a job of one rank. Backends over our
  // transports work without it, and so does MPI, whose first rank then hosts one.
  std::shared_ptr<store::Store> store = nullptr;
  // How long connecting may take, and any call without a timeout of its own.
  milliseconds timeout{600'000};
  // The address of this host that listeners bind to.
  std::string bind_address = "127.0.0.1";
  // The algorithm of calls that ask for none; used only by our own transports.
  Algorithm algorithm = Algorithm::automatic;
  // When an engine's calls are compared between ranks.
  backends::LedgerMode ledger = backends::LedgerMode::automatic;
  // Our transports reach this process, and all ranks of the group in order, at these addresses;
  // `group_id` is the group's name there, the same on all ranks and different from every other
  // group's.
  std::shared_ptr<Endpoint> endpoint = nullptr;
  std::vector<EndpointAddress> addresses = {};
  std::string group_id = "";
  // The lane of tensors on GPUs beside our transports, if any.
  Lane lane = {};
};

// Makes a communicator. Every rank of the group calls it with equal options, and it returns once
// all are connected. CommError (timeout) names the ranks that did not come.
using MakeGroup = std::function<std::shared_ptr<Communicator>(const GroupInfo& group,
                                                              const GroupOptions& options)>;

// How lanes are made (backends::Makes::lanes).
struct Lanes {
  // Identifies the device among all devices of the job; empty if this process cannot use it.
  std::function<std::string(c10::Device device)> identity = nullptr;
  std::function<MakeLane(c10::Device device)> make = nullptr;
  // Uses the current device, alone, and throws if that fails.
  std::function<void(const Deadline& deadline)> try_alone = nullptr;
};

// A row of the table, and the functions that make it: `make` for communicators, `lanes` for lanes.
struct Backend {
  backends::Capabilities can;
  MakeGroup make = nullptr;
  Lanes lanes = {};
};

// Adds a backend, which JoinOptions, DistributedConfig and configs can then choose by its name.
// Every rank adds it before it joins. UsageError for a name that is taken, or if neither function
// is given. Any thread may call it.
void register_backend(Backend backend);

// The backends that this build has and the program has added, "auto" first.
std::vector<std::string> available_backends();
// Throws UsageError, with that list, if `backend` is not one of them: no backend has that name, or
// this build lacks it; the error then says what to install.
void check_backend(const std::string& backend);
// The backend of that name. UsageError as in check_backend().
Backend backend_named(const std::string& name);
// Makes a communicator over the backend of that name, which has to make communicators.
std::shared_ptr<Communicator> make_group(const std::string& backend, const GroupInfo& group,
                                         const GroupOptions& options);

}  // namespace lockstep::comm
