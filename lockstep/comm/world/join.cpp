#include <lockstep/comm/world/join.h>

#include <algorithm>
#include <map>
#include <optional>

#include <lockstep/base/clock.h>
#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/comm/open_groups.h>
#include <lockstep/comm/transport/connect.h>
#include <lockstep/comm/transport/wait_watch.h>
#include <lockstep/comm/world/backends.h>
#include <lockstep/comm/world/torchrun_store.h>
#include <lockstep/flight/journal.h>
#include <lockstep/launch/rank_side/launcher_line.h>
#include <lockstep/store/server.h>

#if defined(LOCKSTEP_HAVE_MPI)
#include <lockstep/comm/backends/mpi/mpi.h>
#endif

namespace lockstep::comm {

namespace {

// The things that ranks need before they can communicate: the job's store, and the secret that
// proves membership.
struct MeetingPoint {
  std::shared_ptr<store::Store> store;
  net::Secret secret = net::Secret::random();
  net::Address address;  // address of the store's host, which determines this host's own address
};

std::optional<net::Secret> secret_from(const LaunchEnvironment& launch) {
  if (launch.secret_fd) return net::Secret::from_descriptor(*launch.secret_fd);
  if (!launch.secret_file.empty()) return net::Secret::from_file(launch.secret_file);
  return std::nullopt;
}

MeetingPoint meet_at_lockstep_store(const LaunchEnvironment& launch, Deadline deadline) {
  MeetingPoint meeting;
  meeting.address = net::Address::parse(launch.store_endpoint, 0, "LOCKSTEP_STORE");
  const auto secret = secret_from(launch);
  if (!secret)
    throw UsageError("LOCKSTEP_STORE is set, but neither LOCKSTEP_SECRET_FD nor "
                     "LOCKSTEP_SECRET_FILE is: start this program with 'lockstep run'");
  meeting.secret = *secret;
  // The store existed before this process: if it is gone, the generation is over.
  meeting.store = std::make_shared<store::Client>(meeting.address, meeting.secret, deadline,
                                                  static_cast<std::uint32_t>(launch.generation),
                                                  net::IfRefused::give_up);
  return meeting;
}

// torchrun's store has no secret: every process that reaches it can read its contents. Unless a
// secret file is given, rank 0 makes a secret and leaves it there.
MeetingPoint meet_at_torchrun_store(const LaunchEnvironment& launch, Deadline deadline) {
  MeetingPoint meeting;
  const TorchrunStoreOptions options = torchrun_store_options(launch);
  meeting.address = {options.host, options.port};
  // otherwise c10d's store would try a wrong name until the deadline
  net::resolve(meeting.address);
  meeting.store = make_torchrun_store(options, deadline);
  if (const auto secret = secret_from(launch)) {
    meeting.secret = *secret;
    return meeting;
  }
  const std::string key = fmt::format("lockstep/{}/secret", launch.generation);
  if (launch.rank == 0) {
    log::warn("this job was not started by 'lockstep run' and has no secret of its own: one is "
              "passed through torchrun's store, which anyone who reaches {} can read. Set "
              "LOCKSTEP_SECRET_FILE to a file with mode 0600 on every host to prevent that.",
              meeting.address.text());
    const auto bytes = meeting.secret.bytes();
    meeting.store->set(key, {reinterpret_cast<const char*>(bytes.data()), bytes.size()}, deadline);
  }
  const std::string shared = meeting.store->wait({key}, deadline).front();
  meeting.secret = net::Secret::from_bytes(std::as_bytes(std::span(shared)));
  return meeting;
}

// Rank 0 hosts a store at MASTER_ADDR:MASTER_PORT; every rank reads the secret from a file.
MeetingPoint meet_at_rank_zero(const LaunchEnvironment& launch, Deadline deadline) {
  MeetingPoint meeting;
  const auto secret = secret_from(launch);
  if (!secret)
    throw UsageError("under srun set LOCKSTEP_SECRET_FILE to a file with mode 0600 that every host "
                     "can read, for example: (umask 077; head -c 32 /dev/urandom > ~/.job-secret)");
  meeting.secret = *secret;
  meeting.address = {launch.master_addr, launch.master_port};
  std::unique_ptr<store::Server> server;
  if (launch.rank == 0) server = std::make_unique<store::Server>(meeting.address, meeting.secret);
  meeting.store = std::make_shared<store::RankStore>(
      meeting.address, meeting.secret, std::move(server), launch.world_size, deadline);
  return meeting;
}

// mpirun has connected the ranks already: rank 0 sends the store's address over MPI.
MeetingPoint meet_over_mpi(const LaunchEnvironment& launch, Deadline deadline) {
#if defined(LOCKSTEP_HAVE_MPI)
  MeetingPoint meeting;
  std::optional<backends::BootstrapInfo> mine;
  std::unique_ptr<store::Server> server;
  if (launch.rank == 0) {
    const std::string host = launch.num_nodes == 1         ? "127.0.0.1"
                             : !launch.master_addr.empty() ? launch.master_addr
                                                           : net::own_host_name();
    if (const auto secret = secret_from(launch)) meeting.secret = *secret;
    server = std::make_unique<store::Server>(net::Address{host, 0}, meeting.secret);
    mine = backends::BootstrapInfo{server->address(), meeting.secret};
  }
  const backends::BootstrapInfo info = backends::exchange_over_mpi(mine, deadline);
  meeting.secret = info.secret;
  meeting.address = info.store;
  meeting.store = std::make_shared<store::RankStore>(
      meeting.address, meeting.secret, std::move(server), launch.world_size, deadline);
  return meeting;
#else
  if (launch.master_addr.empty() || launch.master_port == 0)
    throw UsageError(
        "this program was started by mpirun, but Lockstep was built without MPI: build "
        "it where Open MPI's headers are (libopenmpi-dev), use 'lockstep run', or set "
        "MASTER_ADDR, MASTER_PORT and LOCKSTEP_SECRET_FILE");
  return meet_at_rank_zero(launch, deadline);
#endif
}

MeetingPoint meet(const LaunchEnvironment& launch, Deadline deadline) {
  switch (launch.launcher) {
    case Launcher::lockstep: return meet_at_lockstep_store(launch, deadline);
    case Launcher::torchrun: return meet_at_torchrun_store(launch, deadline);
    case Launcher::mpirun: return meet_over_mpi(launch, deadline);
    case Launcher::srun: return meet_at_rank_zero(launch, deadline);
    case Launcher::none: break;
  }
  MeetingPoint alone;
  alone.address = {"127.0.0.1", 0};
  return alone;
}

// Every rank leaves a text in the store and reads the others'.
std::vector<std::string> exchange_texts(store::Store& store, const std::string& prefix,
                                        const std::string& own, const GroupInfo& world,
                                        Deadline deadline) {
  std::vector<std::string> keys;
  for (const int rank : world.global_ranks) keys.push_back(fmt::format("{}/{}", prefix, rank));
  store.set(keys[static_cast<std::size_t>(world.rank)], own, deadline);
  try {
    return store.wait(keys, deadline);
  } catch (const CommError& error) {
    if (error.fault() != Fault::timeout) throw;
    std::vector<int> missing;
    for (const int rank : world.global_ranks) {
      const auto soon = Deadline::after(milliseconds(1000));
      if (!store.get(keys[static_cast<std::size_t>(rank)], soon)) missing.push_back(rank);
    }
    throw CommError({.fault = Fault::timeout,
                     .operation = "join",
                     .group = world.name,
                     .ranks = missing,
                     .explanation = fmt::format(
                         "They did not come within {:.1f} s. Did they start, and did they call "
                         "join_world?",
                         deadline.span_seconds())});
  }
}

std::vector<EndpointAddress> exchange_addresses(store::Store& store, const std::string& prefix,
                                                const EndpointAddress& own, const GroupInfo& world,
                                                Deadline deadline) {
  std::vector<EndpointAddress> addresses;
  for (const std::string& text : exchange_texts(store, prefix, own.encode(), world, deadline))
    addresses.push_back(EndpointAddress::decode(text));
  return addresses;
}

// Ranks tell each other this about their GPUs, to choose how the tensors on them travel.
struct RankGpu {
  bool used = false;     // whether the rank's tensors are on one
  std::string identity;  // identity of the GPU; empty if the rank has no lane for it

  std::string encode() const { return used ? "gpu " + identity : "none"; }
  static RankGpu decode(const std::string& text) {
    if (!text.starts_with("gpu ")) return {};
    return {.used = true, .identity = text.substr(4)};
  }
};

struct DeviceWay {
  bool by_lane = false;
  std::string reason;  // empty if there was no choice
};

// The backends of a job: that of its communicators, and the row of the lanes that it may have
// beside them.
struct Choice {
  std::string communicators;
  std::optional<backends::Capabilities> lanes = std::nullopt;
  bool lanes_are_needed = false;
};

// The choice for "auto": the first row in the table that takes all tensors, wherever the ranks are,
// and adds to the same bits in every layout.
std::string best_for_communicators() {
  for (const backends::Capabilities& row : backends::table())
    if (row.makes == backends::Makes::communicators &&
        row.tensors == backends::Tensors::on_any_device && row.sums == backends::Sums::canonical &&
        !row.inside_a_host.empty() && !row.between_hosts.empty())
      return row.name;
  LOCKSTEP_CHECK(false, "no row of the table is for every job");
  return "";
}

Choice choose_backends(const std::string& asked_for) {
  if (asked_for == backends::kAutomatic) {
    Choice choice{.communicators = best_for_communicators()};
    for (const backends::Capabilities& row : backends::table())
      if (!choice.lanes && row.makes == backends::Makes::lanes) choice.lanes = row;
    return choice;
  }
  const auto row = backends::find(asked_for);
  if (row->makes == backends::Makes::communicators) return {.communicators = asked_for};
  return {.communicators = best_for_communicators(), .lanes = row, .lanes_are_needed = true};
}

// Chooses how tensors on GPUs travel. All ranks choose the same, because they know the same.
DeviceWay choose_device_way(const std::vector<RankGpu>& ranks, const Choice& choice) {
  const backends::Capabilities& lanes = *choice.lanes;
  std::vector<int> without_gpu, without_lane, sharing;
  std::map<std::string, int> first_with;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const int rank = static_cast<int>(i);
    if (!ranks[i].used)
      without_gpu.push_back(rank);
    else if (ranks[i].identity.empty())
      without_lane.push_back(rank);
    else if (!first_with.emplace(ranks[i].identity, rank).second)
      sharing.push_back(rank);
  }
  if (choice.lanes_are_needed) {
    if (!without_gpu.empty())
      throw UsageError("the backend '{}' needs a GPU on every rank, and the tensors of {} are not "
                       "on one: use the backend auto, or check nvidia-smi and CUDA_VISIBLE_DEVICES "
                       "there",
                       lanes.name, list_ranks(without_gpu));
    if (!without_lane.empty())
      throw UsageError("the backend '{}' needs {}, and {} have none: it is not in "
                       "their build, or not installed (lockstep check says which)",
                       lanes.name, lanes.needs_to_run, list_ranks(without_lane));
    return {.by_lane = true, .reason = "it was asked for"};
  }
  if (without_gpu.size() == ranks.size()) return {};
  if (!without_gpu.empty())
    return {.reason = fmt::format("the tensors of {} are on no GPU", list_ranks(without_gpu))};
  if (!without_lane.empty())
    return {.reason = fmt::format("{} have no {}", list_ranks(without_lane), lanes.needs_to_run)};
  if (!sharing.empty())
    return {.reason = fmt::format("{} {} a GPU with another rank", list_ranks(sharing),
                                  sharing.size() == 1 ? "shares" : "share")};
  return {.by_lane = true, .reason = "every rank has a GPU of its own"};
}

// Tries or prepares the lane for a job's tensors on GPUs, and notes the reason for the choice in
// `world`.
Lane prepare_lane(const Choice& choice, const JoinOptions& options, const std::string& keys,
                  store::Store* store, GroupInfo& world, Deadline deadline) {
  if (!choice.lanes) return {};
  const auto built = available_backends();
  Lanes lanes;
  if (std::ranges::find(built, choice.lanes->name) != built.end())
    lanes = backend_named(choice.lanes->name).lanes;
  if (world.global_ranks.size() == 1) {
    if (choice.lanes_are_needed) lanes.try_alone(deadline);
    return {};
  }
  const RankGpu own{.used = options.device.is_cuda(),
                    .identity = lanes.identity ? lanes.identity(options.device) : ""};
  std::vector<RankGpu> gpus;
  for (const std::string& text : exchange_texts(*store, keys, own.encode(), world, deadline))
    gpus.push_back(RankGpu::decode(text));
  const DeviceWay way = choose_device_way(gpus, choice);
  world.backend_reason = way.reason;
  if (!way.by_lane) return {};
  return {.make = lanes.make(options.device),
          .title = choice.lanes->title,
          .is_needed = choice.lanes_are_needed};
}

std::shared_ptr<Communicator> join_as(const LaunchEnvironment& launch, const JoinOptions& options) {
  log::set_rank(launch.rank, launch.world_size);
  GroupInfo world{.name = "world", .rank = launch.rank};
  world.global_ranks.resize(static_cast<std::size_t>(launch.world_size));
  for (int rank = 0; rank < launch.world_size; ++rank)
    world.global_ranks[static_cast<std::size_t>(rank)] = rank;
  world.generation = static_cast<std::uint32_t>(launch.generation);
  world.journal = std::make_shared<flight::Journal>(launch.flight_directory);

  const Deadline deadline = Deadline::after(options.timeout);
  const MeetingPoint meeting = meet(launch, deadline);
  const std::string bind_host =
      options.bind_host.empty() ? net::local_host_toward(meeting.address) : options.bind_host;
  const Choice choice = choose_backends(options.backend);
  const auto endpoint = std::make_shared<Endpoint>(bind_host, meeting.secret);
  std::string group_id = group_id_from(fmt::format("{}/{}", launch.run_id, launch.generation));
  std::vector<EndpointAddress> addresses = {endpoint->address()};
  if (launch.world_size > 1) {
    // A process may join again after it has left; each time it uses keys of its own.
    const auto join = meeting.store->add(
        fmt::format("lockstep/{}/joins/{}", launch.generation, launch.rank), 1, deadline);
    group_id += fmt::format("/{}", join);
    addresses = exchange_addresses(*meeting.store, "lockstep/" + group_id, endpoint->address(),
                                   world, deadline);
    world.watch = std::make_shared<WaitWatch>(endpoint, launch.rank, addresses);
  }
  const Lane lane = prepare_lane(choice, options, fmt::format("lockstep/{}/gpu", group_id),
                                 meeting.store.get(), world, deadline);
  auto communicator = make_group(choice.communicators, world,
                                 {.store = meeting.store,
                                  .timeout = options.timeout,
                                  .bind_address = bind_host,
                                  .algorithm = options.algorithm,
                                  .endpoint = endpoint,
                                  .addresses = std::move(addresses),
                                  .group_id = group_id,
                                  .lane = lane});
  note_open_group(communicator);
  // A rank that returns knows that all ranks are there.
  communicator
      ->barrier({.timeout = std::chrono::ceil<milliseconds>(deadline.remaining()),
                 .launch = Launch::on_wait})
      .wait_on_host();
  return communicator;
}

}  // namespace

std::string describe(const Communicator& world) {
  const std::string backend = world.backend();
  const std::string reason =
      world.backend_reason().empty() ? "" : fmt::format(" ({})", world.backend_reason());
  if (const std::string& lane = world.lane(); !lane.empty()) {
    const auto row = backends::find(lane);
    const std::string& title = row ? row->title : lane;
    return fmt::format("tensors on GPUs go by {}{}, all others over {}; {} adds in an order of "
                       "its own, so other layouts give the same within rounding",
                       title, reason, backend.substr(lane.size() + 1), title);
  }
  return fmt::format("ranks talk over {}{}; {}", backend,
                     reason.empty() ? "" : ", tensors on GPUs through the host's memory" + reason,
                     world.canonical_order()
                         ? "sums have the same bits in every layout"
                         : "it adds in an order of its own, so other layouts give the same within "
                           "rounding");
}

std::shared_ptr<Communicator> join_world(const JoinOptions& options) {
  check_backend(options.backend);
  // All ranks may be stopped together (Ctrl-Z), and then none of them has kept the others waiting.
  Clock::leave_out_stops();
  await_place_as_spare();
  const LaunchEnvironment launch = read_launch_environment();
  blame_nobody();
  try {
    return join_as(launch, options);
  } catch (const CommError& error) {
    blame(error.global_ranks(), fault_name(error.fault()), launch.rank);
    throw;
  }
}

}  // namespace lockstep::comm
