#include <lockstep/net/handshake.h>

#include <cstring>
#include <vector>

#include <lockstep/base/error.h>
#include <lockstep/net/socket.h>

namespace lockstep::net {

namespace {

using Nonce = std::array<std::byte, 16>;

struct Hello {
  char magic[8];
  std::uint32_t purpose_bytes;
  std::uint32_t reserved;
  Nonce nonce;
};
static_assert(sizeof(Hello) == 32);

constexpr char kMagic[9] = "LOCKSTP1";
constexpr std::byte kWelcome{'W'};

Nonce fresh_nonce() {
  Nonce nonce;
  fill_random(nonce);
  return nonce;
}

Secret::Mac proof(const Secret& secret, char direction, const Nonce& connector,
                  const Nonce& acceptor, const std::string& purpose) {
  std::vector<std::byte> message{std::byte(direction)};
  message.insert(message.end(), connector.begin(), connector.end());
  message.insert(message.end(), acceptor.begin(), acceptor.end());
  const auto text = std::as_bytes(std::span(purpose));
  message.insert(message.end(), text.begin(), text.end());
  return secret.sign(message);
}

[[noreturn]] void refuse(const std::string& explanation) {
  throw CommError(
      {.fault = Fault::refused, .operation = "handshake", .explanation = explanation});
}

}  // namespace

void introduce(const Fd& socket, const Secret& secret, const std::string& purpose,
               const Deadline& deadline) {
  LOCKSTEP_CHECK(purpose.size() <= kLongestPurpose);
  Hello hello{};
  std::memcpy(hello.magic, kMagic, sizeof(hello.magic));
  hello.purpose_bytes = static_cast<std::uint32_t>(purpose.size());
  hello.nonce = fresh_nonce();
  std::vector<std::byte> first(sizeof(hello) + purpose.size());
  std::memcpy(first.data(), &hello, sizeof(hello));
  std::memcpy(first.data() + sizeof(hello), purpose.data(), purpose.size());

  struct Reply {
    Nonce nonce;
    Secret::Mac mac;
  } reply;
  std::byte verdict{};
  try {
    write_all(socket, first, deadline);
    read_all(socket, std::as_writable_bytes(std::span(&reply, 1)), deadline);
    if (!equal(reply.mac, proof(secret, 'A', hello.nonce, reply.nonce, purpose)))
      refuse("The other side does not know this job's secret. Do all hosts use the same one "
             "(LOCKSTEP_SECRET_FILE), and is this the right address?");
    write_all(socket, proof(secret, 'C', hello.nonce, reply.nonce, purpose), deadline);
    read_all(socket, std::span(&verdict, 1), deadline);
  } catch (const CommError& error) {
    if (error.fault() != Fault::peer_lost) throw;
    refuse("The other side hung up during the handshake: its secret differs from this one's, or "
           "it is no Lockstep process.");
  }
  if (verdict != kWelcome) refuse("The other side did not welcome this process.");
}

std::string welcome(const Fd& socket, const Secret& secret, const Deadline& deadline) {
  Hello hello;
  read_all(socket, std::as_writable_bytes(std::span(&hello, 1)), deadline);
  if (std::memcmp(hello.magic, kMagic, sizeof(hello.magic)) != 0 || hello.reserved != 0 ||
      hello.purpose_bytes > kLongestPurpose)
    refuse("Something that does not speak this protocol connected.");
  std::string purpose(hello.purpose_bytes, '\0');
  read_all(socket, std::as_writable_bytes(std::span(purpose)), deadline);

  const Nonce nonce = fresh_nonce();
  const Secret::Mac mine = proof(secret, 'A', hello.nonce, nonce, purpose);
  std::vector<std::byte> reply(nonce.begin(), nonce.end());
  reply.insert(reply.end(), mine.begin(), mine.end());
  write_all(socket, reply, deadline);

  Secret::Mac theirs;
  read_all(socket, theirs, deadline);
  if (!equal(theirs, proof(secret, 'C', hello.nonce, nonce, purpose)))
    refuse("A process that does not know the job's secret tried to connect.");
  write_all(socket, std::span(&kWelcome, 1), deadline);
  return purpose;
}

}  // namespace lockstep::net
