#include <lockstep/store/connection.h>

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <string_view>

namespace lockstep::store {

Connection::Connection(net::Fd socket, const net::Secret& secret, const Greeting& greeting)
    : socket_(std::move(socket)), greeting_(greeting), acceptor_(secret) {}

std::string Connection::client() const {
  return proven() ? acceptor_.purpose().substr(std::string_view(kPurpose).size()) : std::string();
}

Connection::Condition Connection::receive(std::optional<Request>& request) {
  if (!proven()) {
    const Condition condition = shake_hands();
    if (condition != Condition::open || !proven()) return condition;
  }
  return receive_request(request);
}

Connection::Condition Connection::shake_hands() {
  std::array<std::byte, net::kLongestPurpose> bytes;
  while (acceptor_.wanted() > 0) {
    const auto got = read(std::span(bytes).first(std::min(bytes.size(), acceptor_.wanted())));
    if (!got) return Condition::closed;
    if (*got == 0) return flush();
    const auto reply = acceptor_.take(std::span(bytes).first(*got));
    output_.insert(output_.end(), reply.begin(), reply.end());
  }
  if (!proven()) return Condition::refused;
  output_.insert(output_.end(), greeting_.begin(), greeting_.end());
  // One that its job has left behind learns so from the greeting, and nothing else.
  const bool stale = generation_in(acceptor_.purpose()) != generation_in(greeting_);
  const Condition condition = flush();
  return stale ? Condition::refused : condition;
}

Connection::Condition Connection::receive_request(std::optional<Request>& request) {
  std::array<std::byte, 64 << 10> bytes;
  while (true) {
    const auto got = read(bytes);
    if (!got) return Condition::closed;
    if (*got == 0) return Condition::open;
    if (answering_) return Condition::refused;
    input_.insert(input_.end(), bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(*got));
    if (input_.size() < kSizeBytes) continue;
    const auto size = parse_size(std::span(input_).first<kSizeBytes>(), kLongestRequest);
    if (!size || input_.size() > kSizeBytes + *size) return Condition::refused;
    if (input_.size() < kSizeBytes + *size) continue;
    request = parse_request(std::span(input_).subspan(kSizeBytes));
    if (!request) return Condition::refused;
    input_ = {};
    answering_ = true;
  }
}

std::optional<std::size_t> Connection::read(std::span<std::byte> into) {
  while (true) {
    const ssize_t got = ::recv(socket_.get(), into.data(), into.size(), 0);
    if (got > 0) return static_cast<std::size_t>(got);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return 0;
    return std::nullopt;
  }
}

Connection::Condition Connection::send(const Reply& reply) {
  const auto bytes = encode(reply);
  output_.insert(output_.end(), bytes.begin(), bytes.end());
  answering_ = false;
  return flush();
}

Connection::Condition Connection::flush() {
  while (has_unsent()) {
    const ssize_t put =
        ::send(socket_.get(), output_.data() + sent_, output_.size() - sent_, MSG_NOSIGNAL);
    if (put > 0) {
      sent_ += static_cast<std::size_t>(put);
    } else if (put < 0 && errno == EAGAIN) {
      return Condition::open;
    } else if (put == 0 || errno != EINTR) {
      return Condition::closed;
    }
  }
  output_ = {};
  sent_ = 0;
  return Condition::open;
}

}  // namespace lockstep::store
