// How a TCP link reads the bytes on its connection. The first byte of the input says how they come
// (in which pieces, and what the link waits for); the rest is what the peer writes. If the first
// byte is odd, the peer keeps to the format and only its contents are arbitrary: the greeting and
// the checksums are corrected.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include <lockstep/base/hash.h>
#include <lockstep/comm/transport/tcp_link.h>
#include <lockstep/net/socket.h>

#include "target.h"

namespace lockstep::fuzz {

namespace {

using comm::PeerState;
using comm::TcpLink;

// Taken from the format's description, not from its code.
constexpr std::size_t kGreetingBytes = 16;
constexpr std::size_t kHeaderBytes = 80;
constexpr std::size_t kSizeAt = 64;
constexpr std::size_t kChecksumAt = 68;
constexpr std::size_t kHeaderChecksumAt = 76;

constexpr std::size_t kMessageBytes = 64;
const comm::Fingerprint kCall{.sequence = 1};

void put(std::span<std::byte> at, std::uint32_t value) {
  std::memcpy(at.data(), &value, sizeof(value));
}

std::vector<std::byte> put_right(std::span<const std::byte> input) {
  std::vector<std::byte> wire(input.begin(), input.end());
  if (wire.size() < kGreetingBytes) return wire;
  std::fill_n(wire.begin(), kGreetingBytes, std::byte{0});
  put(wire, 0x4c535253);
  auto rest = std::span(wire).subspan(kGreetingBytes);
  while (rest.size() >= kHeaderBytes) {
    const auto header = rest.first(kHeaderBytes);
    rest = rest.subspan(kHeaderBytes);
    std::uint32_t size = 0;
    std::memcpy(&size, header.data() + kSizeAt, sizeof(size));
    const auto payload = rest.first(std::min<std::size_t>(size, rest.size()));
    rest = rest.subspan(payload.size());
    put(header, 0x4c53464d);
    put(header.subspan(kChecksumAt), crc32c(payload));
    put(header.subspan(kHeaderChecksumAt), 0);
    put(header.subspan(kHeaderChecksumAt), crc32c(header));
  }
  return wire;
}

// Whether these bytes follow a header that has their size and checksum.
bool was_sent(std::span<const std::byte> wire, std::span<const std::byte> payload) {
  const std::uint32_t checksum = crc32c(payload);
  const auto size = static_cast<std::uint32_t>(payload.size());
  for (auto rest = wire; rest.size() >= kHeaderBytes + payload.size(); rest = rest.subspan(1)) {
    if (std::memcmp(rest.data() + kSizeAt, &size, sizeof(size)) == 0 &&
        std::memcmp(rest.data() + kChecksumAt, &checksum, sizeof(checksum)) == 0 &&
        std::ranges::equal(rest.subspan(kHeaderBytes, payload.size()), payload))
      return true;
  }
  return false;
}

// The rank that reads: it asks for messages, views them in place, or does neither.
class Reader {
 public:
  enum class Waits { nowhere, for_messages, for_views, for_both };

  Reader(net::Fd connection, Waits waits)
      : link_(0, 1, std::move(connection), {}, std::make_shared<comm::SpareFrames>()),
        waits_(waits) {
    if (waits == Waits::nowhere || waits == Waits::for_views) return;
    for (auto& message : messages_) link_.post_receive(kCall, message);
  }

  TcpLink& link() { return link_; }

  void look(std::span<const std::byte> wire) {
    link_.progress();
    if (waits_ == Waits::nowhere || waits_ == Waits::for_messages) return;
    while (const auto view = link_.try_view(kCall, kMessageBytes)) {
      require(was_sent(wire, {view->data, kMessageBytes}), "what is seen was sent");
      link_.release_view();
    }
  }

 private:
  std::byte messages_[2][kMessageBytes];
  TcpLink link_;
  Waits waits_;
};

}  // namespace

void run(std::span<const std::byte> input) {
  if (input.empty()) return;
  const auto how = std::to_integer<std::size_t>(input.front());
  input = input.subspan(1);
  const std::vector<std::byte> wire =
      how % 2 == 1 ? put_right(input) : std::vector<std::byte>(input.begin(), input.end());
  const auto waits = static_cast<Reader::Waits>(how / 2 % 4);
  const std::size_t piece = 1 + how / 8 * 50;

  auto [ours, theirs] = net::socket_pair();
  Reader reader(std::move(ours), waits);
  TcpLink& link = reader.link();
  try {
    for (auto rest = std::span(wire); !rest.empty() && link.state() == PeerState::alive;) {
      const std::size_t size = std::min(piece, rest.size());
      // A link whose frames nobody takes stops reading, and its connection fills up.
      if (::send(theirs.get(), rest.data(), size, MSG_NOSIGNAL) != static_cast<ssize_t>(size))
        break;
      rest = rest.subspan(size);
      reader.look(wire);
    }
    theirs.reset();
    link.woken(POLLIN | POLLRDHUP);
    reader.look(wire);
    require(link.state() != PeerState::dead, "only repair() finds that a process is gone");
    require(link.state() != PeerState::alive, "an end is noticed");
    require(link.sends_done(), "nothing is owed to a peer that is gone");
  } catch (const CommError& error) {
    require(error.fault() == Fault::corrupted || error.fault() == Fault::mismatch,
            "what a peer does wrong has a name");
    require(std::ranges::find(error.ranks(), 1) != error.ranks().end(), "and a rank");
  }
}

}  // namespace lockstep::fuzz
