// How to reach a TCP link's peer beside the link: to find out what became of it, and to connect
// again.
#pragma once

#include <memory>
#include <string>

#include <lockstep/comm/transport/endpoint.h>
#include <lockstep/comm/transport/link.h>
#include <lockstep/net/fd.h>

namespace lockstep::comm {

struct TcpPeer {
  std::shared_ptr<Endpoint> endpoint;  // ours
  std::shared_ptr<Mailbox> mailbox;    // of the group
  EndpointAddress address;             // theirs
  std::string group_id;

  struct News {
    PeerState state = PeerState::broken;  // where nothing could be found out
    Notice notice;                        // of one that aborted
    net::Fd connection;                   // to one that is alive, where one was to be made
  };
  // Which side makes the connection; the other one only asks.
  enum class Role : std::uint8_t { connects, waits };

  // Asks the peer's endpoint, as rank `self`. Whatever goes wrong, from a name that does not
  // resolve for the moment to memory that has run out, is no news: throws nothing.
  News ask(int self, Role role, Deadline deadline) const;
};

}  // namespace lockstep::comm
