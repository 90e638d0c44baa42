#include <lockstep/launch/rank_side/launcher_line.h>

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/launch/rank_side/report.h>

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
  constexpr std::string_view kWords = "slfbSLP";
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
  // Processes that this one starts are no ranks. The variable may also come from a rank's shell.
  if (!fd || ::fcntl(static_cast<int>(*fd), F_SETFD, FD_CLOEXEC) != 0) return std::nullopt;
  int type = 0;
  socklen_t size = sizeof(type);
  if (::getsockopt(static_cast<int>(*fd), SOL_SOCKET, SO_TYPE, &type, &size) != 0 ||
      type != SOCK_SEQPACKET)
    return std::nullopt;
  return LauncherLine(static_cast<int>(*fd));
}

LineMessage Blame::message() const {
  std::string list;
  for (const int rank : ranks) list += fmt::format("{}{}", list.empty() ? "" : ",", rank);
  return {.word = LineMessage::Word::blames, .variables = {"RANKS=" + list, "FAULT=" + fault}};
}

Blame Blame::of(const LineMessage& message) {
  Blame blame;
  for (const std::string& variable : message.variables) {
    const auto equals = variable.find('=');
    const std::string value = variable.substr(equals + 1);
    if (variable.starts_with("FAULT=")) blame.fault = value;
    if (!variable.starts_with("RANKS=")) continue;
    int rank = 0;
    for (const char* at = value.data(); at != value.data() + value.size();) {
      const auto [end, error] = std::from_chars(at, value.data() + value.size(), rank);
      if (error != std::errc()) break;
      blame.ranks.push_back(rank);
      at = *end == ',' ? end + 1 : end;
    }
  }
  return blame;
}

void LauncherLine::say(const LineMessage& message) const {
  const std::string packet = message.encode();
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

namespace {

// Nothing is told where this process has no line, or where making the message takes memory that
// cannot be had. Where the environment is wrong, joining the job says so.
template <typename MakeMessage>
void tell_launcher(const MakeMessage& make_message) noexcept {
  try {
    if (const auto line = LauncherLine::inherited()) line->say(make_message());
  } catch (...) {
  }
}

}  // namespace

void blame(const std::vector<int>& ranks, const std::string& fault, int own_rank) noexcept {
  constexpr std::size_t kMostNamed = 64;
  if (ranks.empty() || std::find(ranks.begin(), ranks.end(), own_rank) != ranks.end()) return;
  const auto num_named = static_cast<std::ptrdiff_t>(std::min(ranks.size(), kMostNamed));
  tell_launcher([&] {
    return Blame{.ranks = {ranks.begin(), ranks.begin() + num_named}, .fault = fault}.message();
  });
}

void blame_nobody() noexcept {
  tell_launcher([] { return Blame{}.message(); });
}

void report_final_failure() noexcept {
  tell_launcher([] { return LineMessage{.word = LineMessage::Word::final}; });
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
