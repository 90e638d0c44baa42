// The job's store if no launcher has one: a rank hosts it.
#pragma once

#include <memory>

#include <lockstep/store/client.h>
#include <lockstep/store/server.h>

namespace lockstep::store {

// One rank's access to it; on the rank that hosts it, it also owns the server. The host keeps the
// store until the other ranks have left it, because a rank whose group has failed may not have read
// the reason yet. The host's destructor waits some seconds for the other ranks to destroy theirs,
// and warns if it gives up.
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
