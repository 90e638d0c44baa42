// The job's store where no launcher has one: a rank hosts it.
#pragma once

#include <memory>

#include <lockstep/store/client.h>
#include <lockstep/store/server.h>

namespace lockstep::store {

// One rank's way into it; on the rank that hosts it, the store itself. Its host does not take it
// away while other ranks still use it: one whose group has failed may not have read yet why. The
// destructor there waits some seconds for them to destroy theirs, and says so where it gives up.
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
