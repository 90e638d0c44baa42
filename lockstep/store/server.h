// The server of a job's store: one thread, in the launcher or in rank 0.
#pragma once

#include <memory>

#include <lockstep/net/address.h>
#include <lockstep/net/secret.h>
#include <lockstep/store/client.h>
#include <lockstep/store/store.h>

namespace lockstep::store {

// Owns its listening socket and its thread. Both end with it, and clients that wait notice when the
// connection closes. Connections that do not prove within a few seconds that they know the secret
// are dropped and change nothing, however many there are.
class Server {
 public:
  // Listens on exactly `address` (port 0: any free one). UsageError if that is impossible. Keys and
  // values together take at most about `capacity_bytes`. Clients of another generation of the job
  // than `generation` are turned away.
  Server(const net::Address& address, net::Secret secret,
         std::size_t capacity_bytes = kStoreCapacityBytes, std::uint32_t generation = 0);
  ~Server();

  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // The address it listens on, with its actual port.
  net::Address address() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// The job's store if no launcher has one and a rank hosts it: that rank's server, and every rank's
// client. The host keeps the server until the other ranks have left the store, because a rank whose
// group has failed may not have read the reason yet. The host's destructor waits some seconds for
// the other ranks to destroy theirs, and warns if it gives up.
class RankStore final : public Client {
 public:
  // `server` is null on all ranks but the host.
  RankStore(const net::Address& address, const net::Secret& secret, std::unique_ptr<Server> server,
            int num_ranks, Deadline deadline);
  ~RankStore() override;

 private:
  const std::unique_ptr<Server> server_;
  const int num_ranks_;
};

}  // namespace lockstep::store
