// How a launcher finds node 0's.
#pragma once

#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/elastic/channel.h>
#include <lockstep/elastic/introduction.h>
#include <lockstep/net/address.h>
#include <lockstep/net/secret.h>

namespace lockstep::elastic {

// What came of one visit at a launcher's door.
struct Visit {
  enum class Outcome {
    welcome,      // it is node 0's, and the channel stays open
    elsewhere,    // it is of the job, and says where node 0 is
    not_yet,      // a launcher is there, but it is of no job yet, or is busy
    stranger,     // something listens there, and does not say what a launcher says
    unreachable,  // nobody listens there, or it cannot be reached
  };
  Outcome outcome = Outcome::unreachable;
  Channel channel;
  net::Address hub;  // where node 0 is: of welcome and elsewhere
  // Of unreachable and stranger: why. Of not_yet: what it says of itself; empty where it is busy.
  std::string reason;
};

// Says who comes. CommError (refused) where the one who opens does not know the job's secret, or
// does not want this launcher, and says why.
Visit visit(const net::Address& address, const Introduction& who, const net::Secret& secret,
            const Deadline& deadline);

// Tries one address after the other until node 0 is found or the deadline has passed (CommError:
// timeout).
Visit find_hub(const std::vector<net::Address>& addresses, const Introduction& who,
               const net::Secret& secret, const Deadline& deadline);

}  // namespace lockstep::elastic
