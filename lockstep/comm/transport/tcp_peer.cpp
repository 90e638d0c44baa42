#include <lockstep/comm/transport/tcp_peer.h>

#include <cerrno>
#include <exception>

#include <lockstep/net/socket.h>

namespace lockstep::comm {

TcpPeer::News TcpPeer::ask(int self, Role role, Deadline deadline) const {
  try {
    News news;
    int error = 0;
    const net::Fd asking = net::try_connect_tcp(address.tcp, deadline, error);
    if (!asking) {
      // Its host answers, but nobody listens any more.
      if (error == ECONNREFUSED) news.state = PeerState::dead;
      return news;
    }
    auto answer = endpoint->ask(asking, group_id, deadline);
    if (answer.notice) {
      news.state = PeerState::aborted;
      news.notice = std::move(*answer.notice);
    } else if (!answer.open) {
      news.state = PeerState::closed;
    } else if (role == Role::connects) {
      news.connection = endpoint->connect(address, group_id, self, Medium::tcp, deadline);
      news.state = PeerState::alive;
    }
    return news;
  } catch (const std::exception&) {
    return {};
  }
}

}  // namespace lockstep::comm
