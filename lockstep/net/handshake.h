// Proof, on a fresh connection, that both sides know the job's secret, without showing it.
//
//   connector → acceptor   magic, a nonce, the purpose (what the connection is for)
//   acceptor  → connector  a nonce, HMAC over both nonces and the purpose
//   connector → acceptor   HMAC over the same in the other direction
//   acceptor  → connector  one byte: welcome
//
// Each side signs the other's nonce, so a recorded exchange proves nothing later; the directions
// are signed apart, so a reply cannot be played back to its sender.
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

// Longest text a connector may send to say what the connection is for.
inline constexpr std::size_t kLongestPurpose = 4096;

// The connector's side. CommError: refused where the other side's proof is wrong, peer_lost where
// it hangs up before the end (it may be ending, or have shed a connection too many: its own proof
// would have shown a secret that differs), timeout at the deadline.
void introduce(const Fd& socket, const Secret& secret, const std::string& purpose,
               const Deadline& deadline);

// The acceptor's side; returns the purpose. CommError as above; the caller just drops the
// connection.
std::string welcome(const Fd& socket, const Secret& secret, const Deadline& deadline);

// The acceptor's side for a server of one thread: never blocks, never touches a socket, holds
// a few kilobytes. Keeps a reference to the secret. Not thread-safe.
class Acceptor {
 public:
  enum class State : std::uint8_t { reading, welcomed, refused };

  explicit Acceptor(const Secret& secret) : secret_(secret) {}

  State state() const { return state_; }

  // How many bytes it can take now; 0 once it is decided. A caller that never reads more leaves
  // what follows the handshake on the socket.
  std::size_t wanted() const { return expected_ - received_.size(); }

  // Takes at most wanted() bytes and returns what to send back, if anything.
  std::vector<std::byte> take(std::span<const std::byte> bytes);

  // The purpose that the connector stated; proven once welcomed.
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
