// A connection to a job's store.
#pragma once

#include <memory>

#include <lockstep/net/address.h>
#include <lockstep/net/secret.h>
#include <lockstep/net/socket.h>
#include <lockstep/store/store.h>

namespace lockstep::store {

// Thread-safe: each waiting thread uses a connection of its own and holds up no other. A connection
// that breaks is made again within the deadline of the call that needs it, and the call is
// repeated. Calls that change something carry a number by which the server recognises a repeat, so
// that none is applied twice. If nobody listens at the address any more, or another server than the
// first one does, calls fail at once with peer_lost. If the store belongs to another generation of
// the job, which has gone on without this process, they fail with refused.
class Client : public Store {
 public:
  // Connects and proves that it knows the secret. CommError: timeout if nobody answers, refused if
  // the secrets differ, peer_lost if nobody listens and the caller asked to give up then.
  Client(net::Address address, net::Secret secret, Deadline deadline, std::uint32_t generation = 0,
         net::IfRefused if_refused = net::IfRefused::try_again);
  ~Client() override;

  void set(const std::string& key, const std::string& value, Deadline deadline) override;
  std::optional<std::string> get(const std::string& key, Deadline deadline) override;
  std::vector<std::string> wait(const std::vector<std::string>& keys, Deadline deadline) override;
  std::string compare_and_set(const std::string& key, const std::optional<std::string>& expected,
                              const std::string& desired, Deadline deadline) override;
  std::int64_t add(const std::string& key, std::int64_t amount, Deadline deadline) override;
  Versioned watch(const std::string& key, std::uint64_t seen, Deadline deadline) override;
  bool remove(const std::string& key, Deadline deadline) override;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep::store
