// How the launchers of a job's hosts find each other.
//
// The launcher of node 0 has its door at the first of the endpoints that all were told. The others
// come there and introduce themselves, and get the layout once enough have come. The connections
// stay open: they are how a launcher learns that another one failed. Ranks meet in a store, which
// node 0's launcher runs beside, at a port of its own for each generation.
//
// Where restarts are left, the others have doors, too, for the day that node 0 is lost: at one of
// the other endpoints, where that is their host's, otherwise at any port.
//
// Where etcd settles which launcher is node 0's, the endpoints are etcd's: join_by_election.h.
#pragma once

#include <memory>

#include <lockstep/elastic/meeting.h>
#include <lockstep/elastic/peers.h>
#include <lockstep/net/secret.h>

namespace lockstep::elastic {

// UsageError where an address is not this host's or is taken; CommError where node 0 does not
// answer in time or the secret differs.
std::unique_ptr<Peers> join_job(const MeetingOptions& options, const net::Secret& secret);

}  // namespace lockstep::elastic
