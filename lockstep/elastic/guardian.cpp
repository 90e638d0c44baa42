#include <lockstep/elastic/guardian.h>

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
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

void Guardian::start(const std::vector<RankStart>& ranks) {
  for (const RankStart& rank : ranks) {
    const StartHeader start{.slot = rank.slot,
                            .last = &rank == &ranks.back() ? 1 : 0,
                            .num_cpus = static_cast<std::int32_t>(rank.cpus.size()),
                            .reads_terminal = rank.reads_terminal ? 1 : 0};
    std::string block(reinterpret_cast<const char*>(&start), sizeof(start));
    block.append(reinterpret_cast<const char*>(rank.cpus.data()), rank.cpus.size() * sizeof(int));
    for (const std::string& variable : rank.variables) block.append(variable).push_back('\0');
    const std::array<int, kRankDescriptors> descriptors = {
        rank.standard_output.get(), rank.standard_error.get(), rank.line.get()};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(descriptors))> control{};
    iovec payload{block.data(), block.size()};
    msghdr message{};
    message.msg_iov = &payload;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(descriptors));
    std::memcpy(CMSG_DATA(header), descriptors.data(), sizeof(descriptors));
    ssize_t sent = 0;
    do {
      sent = ::sendmsg(channel_.get(), &message, MSG_NOSIGNAL);
    } while (sent < 0 && errno == EINTR);
    // One that was killed is noticed by next().
    if (sent < 0 && errno == EPIPE) return;
    if (sent != static_cast<ssize_t>(block.size()))
      throw UsageError("cannot hand {} bytes of environment to a rank: {}", block.size(),
                       std::strerror(errno));
  }
}

void Guardian::signal(int slot, int signal) {
  command({.kind = GuardianCommand::Kind::signal, .slot = slot, .signal = signal});
}

void Guardian::sweep() { command({.kind = GuardianCommand::Kind::sweep}); }

void Guardian::clear() { command({.kind = GuardianCommand::Kind::clear}); }

void Guardian::command(const GuardianCommand& command) {
  ::send(channel_.get(), &command, sizeof(command), MSG_NOSIGNAL);
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
