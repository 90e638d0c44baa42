// The acceptor's side of the handshake. The input is what a stranger sends, cut into pieces by its
// own bytes. If its first byte is odd, the stranger is a member who knows the secret, and the proof
// is corrected.
#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <vector>

#include <lockstep/net/handshake.h>

#include "target.h"

namespace lockstep::fuzz {

namespace {

using net::Acceptor;
using net::Secret;

constexpr std::size_t kChallengeBytes = 48;

// Computed from the handshake's description, not by its code.
Secret::Mac true_proof(const Secret& secret, std::span<const std::byte> connector_nonce,
                       std::span<const std::byte> acceptor_nonce, const std::string& purpose) {
  std::vector<std::byte> message{std::byte{'C'}};
  message.insert(message.end(), connector_nonce.begin(), connector_nonce.end());
  message.insert(message.end(), acceptor_nonce.begin(), acceptor_nonce.end());
  const auto text = std::as_bytes(std::span(purpose));
  message.insert(message.end(), text.begin(), text.end());
  return secret.sign(message);
}

}  // namespace

void run(std::span<const std::byte> input) {
  static const Secret secret = Secret::random();
  if (input.empty()) return;
  const bool member = (std::to_integer<int>(input.front()) & 1) != 0;
  const std::size_t piece = 1 + std::to_integer<std::size_t>(input.front()) / 2;
  input = input.subspan(1);

  Acceptor acceptor(secret);
  std::vector<std::byte> sent;
  bool challenged = false;
  while (acceptor.wanted() > 0) {
    require(acceptor.state() == Acceptor::State::reading, "only who reads wants bytes");
    require(acceptor.wanted() <= net::kLongestPurpose, "no more than the longest purpose at once");
    const std::size_t size = std::min({piece, acceptor.wanted(), input.size()});
    if (size == 0) return;
    const auto bytes = input.first(size);
    input = input.subspan(size);
    sent.insert(sent.end(), bytes.begin(), bytes.end());
    const auto reply = acceptor.take(bytes);
    if (reply.empty()) continue;
    require(!challenged && reply.size() == kChallengeBytes,
            "nothing but a challenge for who has proven nothing");
    challenged = true;
    if (!member) continue;
    const auto mac = true_proof(secret, std::span(sent).subspan(16, 16), std::span(reply).first(16),
                                acceptor.purpose());
    require(acceptor.take(mac).size() == 1, "a member is welcomed");
    require(acceptor.state() == Acceptor::State::welcomed, "a member is welcomed");
    require(acceptor.purpose().size() == sent.size() - 32, "the purpose is what was sent");
    return;
  }
  require(acceptor.state() == Acceptor::State::refused, "a stranger is refused");
}

}  // namespace lockstep::fuzz
