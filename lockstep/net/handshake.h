// Proof, on a fresh connection, that both sides know the job's secret, without showing it.
//
//   connector → acceptor   magic, a nonce, the purpose (what the connection is for)
//   acceptor  → connector  a nonce, HMAC over both nonces and the purpose
//   connector → acceptor   HMAC over the same in the other direction
//   acceptor  → connector  one byte: welcome
//
// Each side signs the other's nonce, so a recorded exchange proves nothing later. The two
// directions are signed differently, so a reply cannot be played back to its sender.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/net/fd.h>
#include <lockstep/net/secret.h>

namespace lockstep::net {

// The longest text that a connector may send as the connection's purpose.
inline constexpr std::size_t kLongestPurpose = 4096;

// The connector's side. CommError: refused if the other side's proof is wrong, peer_lost if it
// hangs up before the end, timeout at the deadline. A peer that hangs up may be ending, or may have
// shed connections; if the secrets differed, its own proof would have shown that.
void introduce(const Fd& socket, const Secret& secret, const std::string& purpose,
               const Deadline& deadline);

// The acceptor's side; returns the purpose. CommError as above; the caller then drops the
// connection.
std::string welcome(const Fd& socket, const Secret& secret, const Deadline& deadline);

// The acceptor's side for a server with one thread: never blocks, never touches a socket, and holds
// a few kilobytes. Keeps a reference to the secret. Not thread-safe.
class Acceptor {
 public:
  enum class State : std::uint8_t { reading, welcomed, refused };

  explicit Acceptor(const Secret& secret) : secret_(secret) {}

  State state() const { return state_; }

  // The number of bytes that it can take now; 0 once it is decided. A caller that never reads more
  // leaves the bytes after the handshake on the socket.
  std::size_t wanted() const { return expected_ - received_.size(); }

  // Takes at most wanted() bytes and returns what to send back, if anything.
  std::vector<std::byte> take(std::span<const std::byte> bytes);

  // The purpose that the connector stated; it is proven once the connector is welcomed.
  const std::string& purpose() const { return purpose_; }

 private:
  static constexpr std::size_t kHelloBytes = 32;
  enum class Step : std::uint8_t { hello, purpose, proof };
  using Nonce = std::array<std::byte, 16>;

  std::vector<std::byte> step();
  std::vector<std::byte> challenge();
  void refuse();

  const Secret& secret_;
  State state_ = State::reading;
  Step step_ = Step::hello;
  std::size_t expected_ = kHelloBytes;
  std::vector<std::byte> received_;
  Nonce theirs_{};
  Nonce mine_{};
  std::string purpose_;
};

}  // namespace lockstep::net
