#include <lockstep/base/launcher_line.h>

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>

namespace lockstep {

namespace {

constexpr std::size_t kLongestMessage = 256 << 10;

}  // namespace

std::string LineMessage::encode() const {
  std::string packet(1, static_cast<char>(word));
  for (const std::string& variable : variables) packet.append(variable).push_back('\0');
  return packet;
}

std::optional<LineMessage> LineMessage::decode(std::string_view packet) {
  constexpr std::string_view kWords = "slfSLP";
  if (packet.empty() || kWords.find(packet.front()) == std::string_view::npos) return std::nullopt;
  LineMessage message{.word = static_cast<Word>(packet.front())};
  for (packet.remove_prefix(1); !packet.empty();) {
    const auto end = packet.find('\0');
    if (end == std::string_view::npos || packet.substr(0, end).find('=') == std::string_view::npos)
      return std::nullopt;
    message.variables.emplace_back(packet.substr(0, end));
    packet.remove_prefix(end + 1);
  }
  return message;
}

std::optional<LauncherLine> LauncherLine::inherited() {
  const auto fd = environment_integer("LOCKSTEP_LINE_FD", 0, 1 << 20);
  // What this process starts is no rank. The variable may also have come from a rank's shell.
  if (!fd || ::fcntl(static_cast<int>(*fd), F_SETFD, FD_CLOEXEC) != 0) return std::nullopt;
  int type = 0;
  socklen_t size = sizeof(type);
  if (::getsockopt(static_cast<int>(*fd), SOL_SOCKET, SO_TYPE, &type, &size) != 0 ||
      type != SOCK_SEQPACKET)
    return std::nullopt;
  return LauncherLine(static_cast<int>(*fd));
}

void LauncherLine::say(LineMessage::Word word) const {
  const std::string packet = LineMessage{.word = word}.encode();
  [[maybe_unused]] const auto sent =
      ::send(fd_, packet.data(), packet.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

std::optional<LineMessage> LauncherLine::hear(const Deadline& deadline, int wake) const {
  std::string packet(kLongestMessage, '\0');
  while (true) {
    const ssize_t got = ::recv(fd_, packet.data(), packet.size(), MSG_DONTWAIT);
    if (got > 0) {
      if (auto message = LineMessage::decode({packet.data(), static_cast<std::size_t>(got)}))
        return message;
      continue;
    }
    if (got == 0 || (errno != EINTR && errno != EAGAIN))
      throw CommError({.fault = Fault::peer_lost,
                       .operation = "next generation",
                       .explanation = "The launcher that started this rank is gone."});
    std::array<pollfd, 2> polled = {{{fd_, POLLIN, 0}, {wake, POLLIN, 0}}};
    ::poll(polled.data(), polled.size(), deadline.poll_timeout(milliseconds(1000)));
    if (polled[1].revents != 0 || (polled[0].revents == 0 && deadline.passed()))
      return std::nullopt;
  }
}

void await_place(const LauncherLine& line) {
  while (true) {
    const auto message = line.hear(Deadline::never());
    if (!message || message->word != LineMessage::Word::place) continue;
    for (const std::string& variable : message->variables) {
      const auto equals = variable.find('=');
      set_environment(variable.substr(0, equals).c_str(), variable.substr(equals + 1).c_str());
    }
    return;
  }
}

void await_place_as_spare() {
  if (!read_launch_environment().spare) return;
  const auto line = LauncherLine::inherited();
  if (!line)
    throw UsageError("LOCKSTEP_SPARE is set, but this process has no line to a launcher: it is for "
                     "'lockstep run --spares' to set");
  await_place(*line);
}

}  // namespace lockstep
