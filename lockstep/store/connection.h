// One connection of the store's server, from the first byte of a stranger to the last reply.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/net/fd.h>
#include <lockstep/net/handshake.h>
#include <lockstep/store/protocol.h>

namespace lockstep::store {

// Owns its socket. Never blocks; not thread-safe. Memory grows with the bytes that arrive, never
// with a size that is only announced, and not past one request and one reply.
class Connection {
 public:
  Connection(net::Fd socket, const net::Secret& secret, const Greeting& greeting);

  int fd() const { return socket_.get(); }
  Clock::time_point since() const { return since_; }

  // Whether it has proven to be of this job, and wants the store.
  bool proven() const {
    return acceptor_.state() == net::Acceptor::State::welcomed &&
           acceptor_.purpose().starts_with(kPurpose);
  }

  // Which client this is, across its connections. Empty before it is proven.
  std::string client() const;

  enum class Condition : std::uint8_t {
    open,
    closed,   // by the other side
    refused,  // a stranger, or a break of the protocol
  };

  // Reads what is there. A request that is complete appears in `request`; until it is answered with
  // send(), the other side has nothing to say, and bytes that it sends are a break of the protocol.
  Condition receive(std::optional<Request>& request);

  // The answer to the request received last.
  Condition send(const Reply& reply);

  // Writes what waits to be written, as far as that goes.
  Condition flush();
  bool has_unsent() const { return sent_ < output_.size(); }

 private:
  Condition shake_hands();
  Condition receive_request(std::optional<Request>& request);
  // Bytes read into `into`; 0 where none are there for now, nothing where the other side closed.
  std::optional<std::size_t> read(std::span<std::byte> into);

  net::Fd socket_;
  Clock::time_point since_ = Clock::now();
  const Greeting& greeting_;
  net::Acceptor acceptor_;
  bool answering_ = false;  // a request has been received and not answered
  std::vector<std::byte> input_;
  std::vector<std::byte> output_;
  std::size_t sent_ = 0;
};

}  // namespace lockstep::store
