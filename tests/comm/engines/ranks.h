// Ranks as threads of the test, which share the job's store.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <lockstep/comm/backends/engine/engine_group.h>
#include <lockstep/comm/communicator.h>
#include <lockstep/net/secret.h>
#include <lockstep/store/client.h>
#include <lockstep/store/server.h>

namespace lockstep::comm::backends {

class JobStore {
 public:
  JobStore() : secret_(net::Secret::random()), server_({.host = "127.0.0.1", .port = 0}, secret_) {}

  net::Address address() const { return server_.address(); }
  const net::Secret& secret() const { return secret_; }

  std::shared_ptr<store::Store> connect() const {
    return std::make_shared<store::Client>(server_.address(), secret_,
                                           Deadline::after(milliseconds(10'000)));
  }

 private:
  net::Secret secret_;
  store::Server server_;
};

// Runs `body` once for each rank, each in a thread; an exception in one fails the test.
void run_ranks(int size, const std::function<void(int rank)>& body);

// A group of this name with that many ranks.
GroupInfo group_info(const std::string& name, int rank, int size);

}  // namespace lockstep::comm::backends
