#include <lockstep/net/handshake.h>

#include <cstring>

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

struct Challenge {
  Nonce nonce;
  Secret::Mac mac;
};
static_assert(sizeof(Challenge) == 48);

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

[[noreturn]] void fail(Fault fault, const std::string& explanation) {
  throw CommError({.fault = fault, .operation = "handshake", .explanation = explanation});
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
  if (!purpose.empty()) std::memcpy(first.data() + sizeof(hello), purpose.data(), purpose.size());

  Challenge challenge;
  std::byte verdict{};
  try {
    write_all(socket, first, deadline);
    read_all(socket, std::as_writable_bytes(std::span(&challenge, 1)), deadline);
    if (!equal(challenge.mac, proof(secret, 'A', hello.nonce, challenge.nonce, purpose)))
      fail(Fault::refused,
           "The other side does not know this job's secret. Do all hosts use the same one "
           "(LOCKSTEP_SECRET_FILE), and is this the right address?");
    write_all(socket, proof(secret, 'C', hello.nonce, challenge.nonce, purpose), deadline);
    read_all(socket, std::span(&verdict, 1), deadline);
  } catch (const CommError& error) {
    if (error.fault() != Fault::peer_lost) throw;
    fail(Fault::peer_lost,
         "The other side hung up during the handshake: it is ending, or it is no Lockstep "
         "process.");
  }
  if (verdict != kWelcome) fail(Fault::refused, "The other side did not welcome this process.");
}

std::string welcome(const Fd& socket, const Secret& secret, const Deadline& deadline) {
  Acceptor acceptor(secret);
  while (acceptor.state() == Acceptor::State::reading) {
    std::vector<std::byte> bytes(acceptor.wanted());
    read_all(socket, bytes, deadline);
    write_all(socket, acceptor.take(bytes), deadline);
  }
  if (acceptor.state() == Acceptor::State::refused)
    fail(Fault::refused,
         "Something connected that does not speak this protocol or does not know the job's "
         "secret.");
  return acceptor.purpose();
}

std::vector<std::byte> Acceptor::take(std::span<const std::byte> bytes) {
  LOCKSTEP_CHECK(bytes.size() <= wanted());
  received_.insert(received_.end(), bytes.begin(), bytes.end());
  if (state_ != State::reading || received_.size() < expected_) return {};
  return step();
}

std::vector<std::byte> Acceptor::step() {
  switch (step_) {
    case Step::hello: {
      Hello hello;
      std::memcpy(&hello, received_.data(), sizeof(hello));
      if (std::memcmp(hello.magic, kMagic, sizeof(hello.magic)) != 0 || hello.reserved != 0 ||
          hello.purpose_bytes > kLongestPurpose) {
        refuse();
        return {};
      }
      theirs_ = hello.nonce;
      received_.clear();
      expected_ = hello.purpose_bytes;
      step_ = Step::purpose;
      // A purpose may be empty; then there is nothing more to wait for.
      if (expected_ > 0) return {};
      return challenge();
    }
    case Step::purpose:
      purpose_.assign(reinterpret_cast<const char*>(received_.data()), received_.size());
      return challenge();
    case Step::proof: break;
  }
  Secret::Mac theirs;
  std::memcpy(theirs.data(), received_.data(), theirs.size());
  if (!equal(theirs, proof(secret_, 'C', theirs_, mine_, purpose_))) {
    refuse();
    return {};
  }
  state_ = State::welcomed;
  received_.clear();
  expected_ = 0;
  return {kWelcome};
}

std::vector<std::byte> Acceptor::challenge() {
  mine_ = fresh_nonce();
  const Challenge challenge{mine_, proof(secret_, 'A', theirs_, mine_, purpose_)};
  received_.clear();
  expected_ = sizeof(Secret::Mac);
  step_ = Step::proof;
  const auto bytes = std::as_bytes(std::span(&challenge, 1));
  return {bytes.begin(), bytes.end()};
}

void Acceptor::refuse() {
  state_ = State::refused;
  received_.clear();
  expected_ = 0;
}

}  // namespace lockstep::net
