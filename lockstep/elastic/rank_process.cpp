#include <lockstep/elastic/rank_process.h>

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include <lockstep/base/error.h>

namespace lockstep::elastic {

bool RankProcess::streams_open() const {
  return std::any_of(streams.begin(), streams.end(),
                     [](const RankStream& stream) { return stream.open(); });
}

void RankProcess::drain() {
  for (RankStream& stream : streams)
    while (stream.open() && !stream.held_back() && stream.read()) {
    }
}

bool RankProcess::say(const LineMessage& message) const {
  const std::string packet = message.encode();
  return ::send(line.get(), packet.data(), packet.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
         static_cast<ssize_t>(packet.size());
}

std::optional<LineMessage> RankProcess::hear() {
  if (!line) return std::nullopt;
  std::array<char, 4096> packet;
  ssize_t got = ::recv(line.get(), packet.data(), packet.size(), MSG_DONTWAIT);
  // It ended without hearing all that it was told. What it said itself comes after that error.
  if (got < 0 && errno == ECONNRESET)
    got = ::recv(line.get(), packet.data(), packet.size(), MSG_DONTWAIT);
  if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) {
    line.reset();
    stays = false;
  }
  if (got <= 0) return std::nullopt;
  return LineMessage::decode({packet.data(), static_cast<std::size_t>(got)});
}

LineEnds make_line() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
    throw UsageError("cannot make a pair of sockets: {}; raise 'ulimit -n' or run fewer ranks",
                     std::strerror(errno));
  return {net::Fd(ends[0]), net::Fd(ends[1])};
}

}  // namespace lockstep::elastic
