// How launchers find each other where etcd settles which of them is node 0's.
#pragma once

#include <memory>

#include <lockstep/elastic/meeting.h>
#include <lockstep/elastic/peers.h>
#include <lockstep/net/secret.h>

namespace lockstep::elastic {

// Whoever comes first is node 0, but for launchers that claim another node rank; the others learn
// from etcd where its door is. CommError where etcd or node 0 does not answer in time or the secret
// differs.
std::unique_ptr<Peers> join_by_election(const MeetingOptions& options, const net::Secret& secret);

}  // namespace lockstep::elastic
