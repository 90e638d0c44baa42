// Ranks as threads of one process, connected by real links.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <lockstep/comm/algorithms/collectives.h>
#include <lockstep/comm/transport/connect.h>

namespace lockstep::comm::testing {

struct RankSettings {
  Media media = Media::automatic;
  // The host that each rank pretends to be on; empty: all on this one.
  std::vector<int> hosts;
  milliseconds timeout{20000};
};

// Runs `body` on every rank at once and returns each rank's exception (null if none).
std::vector<std::exception_ptr> try_ranks(int n, const RankSettings& settings,
                                          const std::function<void(Transport&)>& body);

// The same, if no rank may throw.
void run_ranks(int n, const RankSettings& settings, const std::function<void(Transport&)>& body);

// Expects that of two ranks, rank 0 ended the group and threw nothing, and rank 1 got the notice.
void expect_ended_by_rank_0(const std::vector<std::exception_ptr>& errors);

// Numbers a call as a communicator would, and begins it.
void begin_call(Transport& transport, Fingerprint fingerprint, milliseconds timeout);

// The endpoints of a job of n ranks, on loopback.
std::vector<std::shared_ptr<Endpoint>> make_endpoints(int n, const net::Secret& secret);

}  // namespace lockstep::comm::testing
