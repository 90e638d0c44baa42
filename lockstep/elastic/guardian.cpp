#include <lockstep/elastic/guardian.h>

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <lockstep/base/error.h>
#include <lockstep/elastic/guardian_process.h>

namespace lockstep::elastic {

Guardian::Guardian(GuardianSetup setup) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
    throw UsageError("cannot make a pair of sockets: {}", std::strerror(errno));
  channel_ = net::Fd(ends[0]);
  net::Fd theirs(ends[1]);
  pid_ = ::fork();
  if (pid_ < 0)
    throw UsageError("cannot start another process: {}; check 'ulimit -u' and the memory left",
                     std::strerror(errno));
  if (pid_ == 0) {
    channel_.reset();
    GuardianProcess(std::move(setup), std::move(theirs)).run();
  }
}

Guardian::~Guardian() {
  channel_.reset();
  int status = 0;
  if (!gone_) ::waitpid(pid_, &status, 0);
}

void Guardian::start_ranks(const std::vector<std::vector<std::string>>& variables) {
  for (const auto& one : variables) {
    std::string block;
    for (const std::string& variable : one) block.append(variable).push_back('\0');
    if (::send(channel_.get(), block.data(), block.size(), MSG_NOSIGNAL) !=
        static_cast<ssize_t>(block.size()))
      throw UsageError("cannot hand {} bytes of environment to a rank: {}", block.size(),
                       std::strerror(errno));
  }
}

void Guardian::signal(int signal) {
  const std::int32_t command = signal;
  ::send(channel_.get(), &command, sizeof(command), MSG_NOSIGNAL);
}

void Guardian::finish() {
  if (finishing_) return;
  finishing_ = true;
  signal(kFinish);
}

std::optional<Guardian::Event> Guardian::next() {
  Event event;
  while (true) {
    const ssize_t got = ::recv(channel_.get(), &event, sizeof(event), MSG_DONTWAIT);
    if (got == sizeof(event)) return event;
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return std::nullopt;
    if (!gone_) {
      int status = 0;
      ::waitpid(pid_, &status, 0);
    }
    gone_ = true;
    return std::nullopt;
  }
}

}  // namespace lockstep::elastic
