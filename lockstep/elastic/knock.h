// How a launcher finds node 0.
#pragma once

#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/elastic/channel.h>
#include <lockstep/elastic/introduction.h>
#include <lockstep/net/address.h>
#include <lockstep/net/secret.h>

namespace lockstep::elastic {

struct Knocked {
  Channel channel;
  net::Address hub;
};

// Comes to the door of a launcher at one of the addresses and says who comes; its answer is still
// to come. Tries one after the other until the deadline. CommError: timeout where nobody opens,
// refused where one does that does not know the job's secret.
Knocked knock(const std::vector<net::Address>& addresses, const Introduction& who,
              const net::Secret& secret, const Deadline& deadline);

}  // namespace lockstep::elastic
