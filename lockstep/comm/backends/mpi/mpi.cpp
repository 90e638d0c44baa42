#include <lockstep/comm/backends/mpi/mpi.h>

#include <mpi.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <thread>

#include <ATen/ATen.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/comm/backends/engine/host_communicator.h>
#include <lockstep/store/server.h>

namespace lockstep::comm::backends {

namespace {

// The process's MPI, initialised once. MPI itself is process-wide state, so this has to be, too; it
// is the only such state here.
struct Runtime {
  std::mutex turn;
  std::once_flag initialised;
  std::atomic<bool> abandoned{false};
  std::atomic<int> level{MPI_THREAD_SINGLE};
};

// Never destroyed: finalize() runs at exit, when other statics may already be gone.
Runtime& runtime() {
  static auto* instance = new Runtime;
  return *instance;
}

// Held around every MPI call that returns at once.
std::unique_lock<std::mutex> mpi_turn() { return std::unique_lock(runtime().turn); }

// Held around MPI calls that wait for other ranks (making groups). Where MPI takes calls from
// several threads it holds no lock; otherwise the other threads wait, too.
std::unique_lock<std::mutex> mpi_long_turn() {
  if (runtime().level >= MPI_THREAD_MULTIPLE) return {};
  return mpi_turn();
}

// Notes that requests were abandoned while MPI may still write to their memory: the process can go
// on, but MPI cannot be finalised any more.
void abandon_mpi() { runtime().abandoned = true; }

// Throws std::runtime_error with MPI's text where `code` is not MPI_SUCCESS.
void check_mpi(int code, const char* what) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw std::runtime_error(
      fmt::format("{}: {}", what, std::string(text, static_cast<std::size_t>(length))));
}

void finalize() {
  if (runtime().abandoned) return;
  const auto turn = mpi_turn();
  int done = 0;
  MPI_Finalized(&done);
  if (done == 0) MPI_Finalize();
}

void initialize() {
  const auto turn = mpi_turn();
  int initialised = 0;
  MPI_Initialized(&initialised);
  int level = MPI_THREAD_SINGLE;
  if (initialised != 0) {
    MPI_Query_thread(&level);
  } else {
    check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
    std::atexit(&finalize);
  }
  if (level < MPI_THREAD_SERIALIZED)
    throw UsageError("the engine 'mpi' works in a thread of its own, but MPI was initialised with "
                     "thread level {} (MPI_THREAD_SERIALIZED, {}, is needed): call "
                     "MPI_Init_thread(…, MPI_THREAD_MULTIPLE, …), or leave it to Lockstep",
                     level, static_cast<int>(MPI_THREAD_SERIALIZED));
  runtime().level = level;
}

// Initialises MPI if the program has not, and then finalises it at exit. UsageError if the program
// has initialised it for one thread only, or was not started by mpirun.
void require_mpi() { std::call_once(runtime().initialised, &initialize); }

// The message that rank 0 sends. It has a fixed size, so that one broadcast is enough.
struct Parcel {
  char host[256] = {};
  std::int32_t port = 0;  // 0: rank 0 has no store
  std::byte secret[net::Secret::kBytes] = {};
};

}  // namespace

MpiWorld mpi_world() {
  require_mpi();
  const auto turn = mpi_turn();
  MpiWorld world;
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &world.rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &world.size), "MPI_Comm_size");
  return world;
}

BootstrapInfo exchange_over_mpi(const std::optional<BootstrapInfo>& mine,
                                const Deadline& deadline) {
  const MpiWorld world = mpi_world();
  // On the heap: if the wait ends early, MPI may write to it for as long as the process lives.
  auto parcel = std::make_unique<Parcel>();
  if (world.rank == 0 && mine) {
    if (mine->store.host.size() >= sizeof(parcel->host))
      throw UsageError("the store's host name has {} characters, at most {} can be sent: '{}'",
                       mine->store.host.size(), sizeof(parcel->host) - 1, mine->store.host);
    std::memcpy(parcel->host, mine->store.host.data(), mine->store.host.size());
    parcel->port = mine->store.port;
    const auto bytes = mine->secret.bytes();
    std::copy(bytes.begin(), bytes.end(), parcel->secret);
  }
  MPI_Request request = MPI_REQUEST_NULL;
  {
    const auto turn = mpi_turn();
    check_mpi(MPI_Ibcast(parcel.get(), sizeof(Parcel), MPI_BYTE, 0, MPI_COMM_WORLD, &request),
              "MPI_Ibcast");
  }
  for (int done = 0; done == 0;) {
    {
      const auto turn = mpi_turn();
      check_mpi(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    }
    if (done == 0 && deadline.passed()) {
      parcel.release();
      abandon_mpi();
      throw CommError({.fault = Fault::timeout,
                       .operation = "exchanging the store's address over MPI",
                       .group = "world",
                       .ranks = {0},
                       .explanation = fmt::format("rank 0 had not sent it after {:.1f} s",
                                                  deadline.span_seconds())});
    }
    if (done == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  if (parcel->port == 0)
    throw UsageError("rank 0 has no store whose address it could send: it must pass one");
  BootstrapInfo info{
      .store = {.host = std::string(parcel->host, strnlen(parcel->host, sizeof(parcel->host))),
                .port = parcel->port},
      .secret = net::Secret::from_bytes(parcel->secret)};
  std::fill(std::begin(parcel->secret), std::end(parcel->secret), std::byte{0});
  return info;
}

namespace {

constexpr int kAllToAllTag = 1;

// Polls eagerly at first, because a small call is over in microseconds; then sleeps between polls,
// for a small part of the time waited so far.
class Backoff {
 public:
  void pause() const {
    using std::chrono::microseconds;
    const auto waited = Clock::now() - begin_;
    if (waited < microseconds(200)) {
      sched_yield();
      return;
    }
    std::this_thread::sleep_for(
        std::clamp<Clock::duration>(waited / 8, microseconds(20), microseconds(500)));
  }

 private:
  Clock::time_point begin_ = Clock::now();
};

MPI_Datatype mpi_type(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return MPI_FLOAT;
    case at::kDouble: return MPI_DOUBLE;
    case at::kInt: return MPI_INT32_T;
    case at::kLong: return MPI_INT64_T;
    case at::kByte: return MPI_UINT8_T;
    default: break;
  }
  LOCKSTEP_CHECK(false, "MPI does not reduce {}", c10::toString(type));
  return MPI_DATATYPE_NULL;
}

void add_bytes(void* from, void* into, int* count, MPI_Datatype*) {
  const auto* theirs = static_cast<const std::uint8_t*>(from);
  auto* mine = static_cast<std::uint8_t*>(into);
  for (int i = 0; i < *count; ++i) mine[i] = static_cast<std::uint8_t>(mine[i] + theirs[i]);
}

MPI_Op mpi_op(BasicOp op, at::ScalarType type) {
  switch (op) {
    case BasicOp::min: return MPI_MIN;
    case BasicOp::max: return MPI_MAX;
    case BasicOp::sum: break;
  }
  if (type != at::kByte) return MPI_SUM;
  // Open MPI's vector code stops at 255 where every other backend, and its own scalar code, wraps.
  static const MPI_Op wrapping_sum = [] {
    MPI_Op made = MPI_OP_NULL;
    check_mpi(MPI_Op_create(&add_bytes, /*commute=*/1, &made), "MPI_Op_create");
    return made;
  }();
  return wrapping_sum;
}

// The non-blocking calls of one operation, and the memory that they use.
struct Requests {
  std::vector<MPI_Request> requests;
  std::vector<at::Tensor> memory;

  MPI_Request* add() { return &requests.emplace_back(MPI_REQUEST_NULL); }
};

// Calls `each(address, count)` for pieces whose count fits an int.
template <typename Each>
void for_each_piece(const at::Tensor& tensor, const Each& each) {
  const auto width = static_cast<std::int64_t>(tensor.element_size());
  const std::int64_t longest = kLargestPieceBytes / width;
  auto* base = static_cast<char*>(tensor.data_ptr());
  for (std::int64_t at = 0; at < tensor.numel(); at += longest)
    each(base + at * width, static_cast<int>(std::min(longest, tensor.numel() - at)));
}

class MpiEngine final : public HostEngine {
 public:
  // Takes ownership of the communicator.
  MpiEngine(MPI_Comm comm, int rank, int size) : rank_(rank), size_(size), comm_(comm) {
    const auto turn = mpi_long_turn();
    check_mpi(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    // Exchanges get a communicator of their own, where their tags match nothing else.
    check_mpi(MPI_Comm_dup(comm_, &pairs_), "MPI_Comm_dup");
    void* largest = nullptr;
    int found = 0;
    check_mpi(MPI_Comm_get_attr(pairs_, MPI_TAG_UB, &largest, &found), "MPI_Comm_get_attr");
    if (found != 0) largest_tag_ = *static_cast<int*>(largest);
  }

  ~MpiEngine() override {
    const auto turn = mpi_turn();
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized != 0 || abandoned_) return;
    MPI_Comm_free(&pairs_);
    MPI_Comm_free(&comm_);
  }

  std::string name() const override { return "mpi"; }

  void all_reduce(const at::Tensor& tensor, BasicOp op, const Deadline& deadline) override {
    Requests requests{.memory = {tensor}};
    post([&] {
      for_each_piece(tensor, [&](void* data, int count) {
        const at::ScalarType type = tensor.scalar_type();
        check_mpi(MPI_Iallreduce(MPI_IN_PLACE, data, count, mpi_type(type), mpi_op(op, type), comm_,
                                 requests.add()),
                  "MPI_Iallreduce");
      });
    });
    complete(std::move(requests), deadline);
  }

  void all_gather(const at::Tensor& output, const at::Tensor& input,
                  const Deadline& deadline) override {
    Requests requests{.memory = {output, input}};
    const int count = static_cast<int>(input.numel());
    post([&] {
      check_mpi(MPI_Iallgather(input.data_ptr(), count, MPI_BYTE, output.data_ptr(), count,
                               MPI_BYTE, comm_, requests.add()),
                "MPI_Iallgather");
    });
    complete(std::move(requests), deadline);
  }

  void broadcast(const at::Tensor& tensor, int root, const Deadline& deadline) override {
    Requests requests{.memory = {tensor}};
    post([&] {
      for_each_piece(tensor, [&](void* data, int count) {
        check_mpi(MPI_Ibcast(data, count, MPI_BYTE, root, comm_, requests.add()), "MPI_Ibcast");
      });
    });
    complete(std::move(requests), deadline);
  }

  // Messages between all pairs at once: their lengths may exceed an int, unlike MPI_Alltoallv's.
  void all_to_all(const at::Tensor& output, const at::Tensor& input,
                  const std::vector<std::int64_t>& output_bytes,
                  const std::vector<std::int64_t>& input_bytes, const Deadline& deadline) override {
    Requests requests{.memory = {output, input}};
    std::vector<std::int64_t> output_at(output_bytes.size(), 0);
    std::vector<std::int64_t> input_at(input_bytes.size(), 0);
    for (std::size_t rank = 1; rank < output_at.size(); ++rank) {
      output_at[rank] = output_at[rank - 1] + output_bytes[rank - 1];
      input_at[rank] = input_at[rank - 1] + input_bytes[rank - 1];
    }
    post([&] {
      // Starts with the next rank, so that not every rank sends to rank 0 first.
      for (int step = 1; step < size_; ++step) {
        const auto from = static_cast<std::size_t>((rank_ - step + size_) % size_);
        const auto to = static_cast<std::size_t>((rank_ + step) % size_);
        receive(output.narrow(0, output_at[from], output_bytes[from]), static_cast<int>(from),
                kAllToAllTag, comm_, requests);
        send(input.narrow(0, input_at[to], input_bytes[to]), static_cast<int>(to), kAllToAllTag,
             comm_, requests);
      }
    });
    const auto self = static_cast<std::size_t>(rank_);
    output.narrow(0, output_at[self], output_bytes[self])
        .copy_(input.narrow(0, input_at[self], input_bytes[self]));
    complete(std::move(requests), deadline);
  }

  void barrier(const Deadline& deadline) override {
    Requests requests;
    post([&] { check_mpi(MPI_Ibarrier(comm_, requests.add()), "MPI_Ibarrier"); });
    complete(std::move(requests), deadline);
  }

  void exchange(const std::vector<Transfer>& transfers, const std::vector<std::uint64_t>& sequences,
                const Deadline& deadline) override {
    Requests requests;
    post([&] {
      for (std::size_t i = 0; i < transfers.size(); ++i) {
        const at::Tensor bytes = byte_alias(transfers[i].tensor);
        const int tag =
            static_cast<int>(sequences[i] % (static_cast<std::uint64_t>(largest_tag_) + 1));
        requests.memory.push_back(bytes);
        if (transfers[i].direction == Transfer::Direction::send)
          send(bytes, transfers[i].peer, tag, pairs_, requests);
        else
          receive(bytes, transfers[i].peer, tag, pairs_, requests);
      }
    });
    complete(std::move(requests), deadline);
  }

  std::unique_ptr<HostEngine> split(const GroupInfo* child, int color, int key, const std::string&,
                                    const Deadline&) override {
    MPI_Comm comm = MPI_COMM_NULL;
    {
      const auto turn = mpi_long_turn();
      check_mpi(MPI_Comm_split(comm_, child == nullptr ? MPI_UNDEFINED : color, key, &comm),
                "MPI_Comm_split");
    }
    if (child == nullptr) return nullptr;
    const int size = static_cast<int>(child->global_ranks.size());
    auto engine = std::make_unique<MpiEngine>(comm, child->rank, size);
    if (size == 1) return nullptr;
    return engine;
  }

  void interrupt() override { interrupted_ = true; }

 private:
  template <typename Post>
  void post(const Post& post_all) {
    if (interrupted_) throw std::runtime_error("the group was interrupted");
    const auto turn = mpi_turn();
    post_all();
  }

  static void send(const at::Tensor& bytes, int peer, int tag, MPI_Comm comm, Requests& requests) {
    for_each_piece(bytes, [&](void* data, int count) {
      check_mpi(MPI_Isend(data, count, MPI_BYTE, peer, tag, comm, requests.add()), "MPI_Isend");
    });
  }

  static void receive(const at::Tensor& bytes, int peer, int tag, MPI_Comm comm,
                      Requests& requests) {
    for_each_piece(bytes, [&](void* data, int count) {
      check_mpi(MPI_Irecv(data, count, MPI_BYTE, peer, tag, comm, requests.add()), "MPI_Irecv");
    });
  }

  void complete(Requests requests, const Deadline& deadline) {
    const Backoff backoff;
    std::vector<MPI_Status> statuses(requests.requests.size());
    for (;;) {
      int done = 0;
      std::string problem;
      try {
        const auto turn = mpi_turn();
        check_all(MPI_Testall(static_cast<int>(requests.requests.size()), requests.requests.data(),
                              &done, statuses.data()),
                  statuses);
      } catch (const std::runtime_error& error) {
        problem = error.what();
      }
      if (problem.empty() && done != 0) return;
      if (problem.empty() && interrupted_) problem = "the group was interrupted";
      if (problem.empty() && deadline.passed()) problem = "the deadline passed";
      if (!problem.empty()) {
        // MPI may write to this memory for as long as the process lives.
        new Requests(std::move(requests));
        abandoned_ = true;
        abandon_mpi();
        throw std::runtime_error(problem);
      }
      backoff.pause();
    }
  }

  static void check_all(int code, const std::vector<MPI_Status>& statuses) {
    if (code == MPI_ERR_IN_STATUS)
      for (const MPI_Status& status : statuses)
        if (status.MPI_ERROR != MPI_ERR_PENDING) check_mpi(status.MPI_ERROR, "MPI_Testall");
    check_mpi(code, "MPI_Testall");
  }

  const int rank_;
  const int size_;
  MPI_Comm comm_;
  MPI_Comm pairs_ = MPI_COMM_NULL;
  int largest_tag_ = 32767;  // the least that the standard guarantees
  std::atomic<bool> interrupted_{false};
  std::atomic<bool> abandoned_{false};
};

// The store that rank 0 hosts if the job has none.
std::shared_ptr<store::Store> host_store(const GroupInfo& group, const EngineOptions& options,
                                         const MpiWorld& world, const Deadline& deadline) {
  if (static_cast<int>(group.global_ranks.size()) != world.size)
    throw UsageError("mpi: the group '{}' has {} of the {} ranks that mpirun started; without a "
                     "store only a group of all of them can be made: make that one and split it",
                     group.name, group.global_ranks.size(), world.size);
  std::unique_ptr<store::Server> server;
  std::optional<BootstrapInfo> mine;
  if (world.rank == 0) {
    const net::Secret secret = net::Secret::random();
    server = std::make_unique<store::Server>(net::Address{.host = options.bind_address, .port = 0},
                                             secret);
    mine = BootstrapInfo{.store = server->address(), .secret = secret};
  }
  const BootstrapInfo info = exchange_over_mpi(mine, deadline);
  return std::make_shared<store::RankStore>(info.store, info.secret, std::move(server), world.size,
                                            deadline);
}

MPI_Comm form_group(const GroupInfo& group) {
  const auto turn = mpi_long_turn();
  MPI_Group world = MPI_GROUP_NULL;
  MPI_Group members = MPI_GROUP_NULL;
  MPI_Comm comm = MPI_COMM_NULL;
  check_mpi(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
  check_mpi(MPI_Group_incl(world, static_cast<int>(group.global_ranks.size()),
                           group.global_ranks.data(), &members),
            "MPI_Group_incl");
  check_mpi(MPI_Comm_create_group(MPI_COMM_WORLD, members, 0, &comm), "MPI_Comm_create_group");
  MPI_Group_free(&members);
  MPI_Group_free(&world);
  return comm;
}

void check_group(const GroupInfo& group, const MpiWorld& world) {
  for (const int rank : group.global_ranks)
    if (rank < 0 || rank >= world.size)
      throw UsageError("mpi: the group '{}' has the global rank {}, but MPI knows {} ranks: "
                       "start the program with mpirun -n {} or more",
                       group.name, rank, world.size, group.global_ranks.size());
  const int mine = group.global_ranks[static_cast<std::size_t>(group.rank)];
  if (mine != world.rank)
    throw UsageError("mpi: this process is rank {} of the group '{}', whose global rank is {}, but "
                     "mpirun made it rank {}: number ranks as mpirun does",
                     group.rank, group.name, mine, world.rank);
}

}  // namespace

std::shared_ptr<Communicator> make_mpi(const GroupInfo& group, const EngineOptions& asked_for) {
  const EngineOptions options = asked_for.with_ledger(LedgerMode::beside);
  const MpiWorld world = mpi_world();
  check_group(group, world);
  if (group.global_ranks.size() == 1)
    return std::make_shared<HostCommunicator>(group, "mpi", nullptr, options, "");

  const Deadline deadline = Deadline::after(options.timeout);
  EngineOptions with_store = options;
  if (!options.store) with_store.store = host_store(group, options, world, deadline);
  const std::string prefix = claim_prefix(group, "mpi", with_store);
  gather_ranks(group, "mpi", *with_store.store, prefix, deadline);
  auto engine = std::make_unique<MpiEngine>(form_group(group), group.rank,
                                            static_cast<int>(group.global_ranks.size()));
  with_store.store->remove(fmt::format("{}/here{}", prefix, group.rank), deadline);
  return std::make_shared<HostCommunicator>(group, "mpi", std::move(engine), with_store, prefix);
}

}  // namespace lockstep::comm::backends
