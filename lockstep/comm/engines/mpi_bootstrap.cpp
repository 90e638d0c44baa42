#include <lockstep/comm/engines/mpi_bootstrap.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include <lockstep/base/error.h>
#include <lockstep/comm/engines/mpi_runtime.h>

namespace lockstep::comm::engines {

namespace {

// What travels: fixed sizes, so that one broadcast does.
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
  // On the heap, because MPI may write to it as long as the process lives where the wait ends early.
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

}  // namespace lockstep::comm::engines
