// The server of a job's store: one thread, in the launcher or in rank 0.
#pragma once

#include <memory>

#include <lockstep/net/address.h>
#include <lockstep/net/secret.h>
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

}  // namespace lockstep::store
