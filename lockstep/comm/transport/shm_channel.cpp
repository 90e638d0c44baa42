#include <lockstep/comm/transport/shm_channel.h>

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace lockstep::comm {

// What travels on the socket. Fixed size, so that writes of different threads never mix.
struct ShmChannel::Signal {
  enum Kind : std::uint32_t { wake = 1, heap_added = 2, heap_removed = 3 };
  std::uint32_t kind;
  std::uint32_t segment;
  std::uint64_t bytes;
};

ShmChannel::ShmChannel(net::Fd socket, ShmControl& mine, const ShmControl& theirs)
    : socket_(std::move(socket)), mine_(mine), theirs_(theirs) {}

void ShmChannel::wake_peer() { send({Signal::wake, 0, 0}, -1); }

void ShmChannel::begin_call() {
  if (announcements_wait_.load(std::memory_order_acquire)) announce_waiting();
  const auto now = theirs_.announcements.load(std::memory_order_acquire);
  if (now == announcements_seen_) return;
  announcements_seen_ = now;
  read();
  for (const std::uint32_t segment : removed_) peer_heap_.erase(segment);
  removed_.clear();
}

const SharedMemory* ShmChannel::peer_segment(std::uint32_t segment) {
  // The announcement was on the socket before any message that refers to it was in the ring.
  if (!peer_heap_.contains(segment)) read();
  const auto found = peer_heap_.find(segment);
  return found == peer_heap_.end() ? nullptr : &found->second;
}

// False where the socket is full, of wake-ups or of announcements: one more wake-up would tell the
// peer nothing.
bool ShmChannel::send(const Signal& signal, int descriptor) {
  Signal copy = signal;
  iovec payload{&copy, sizeof(copy)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &payload;
  message.msg_iovlen = 1;
  if (descriptor >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
  }
  while (::sendmsg(socket_.get(), &message, MSG_NOSIGNAL) < 0) {
    if (errno == EINTR) continue;
    // Any other error means the peer is gone, which reading will find out.
    return errno == EPIPE || errno == ECONNRESET;
  }
  return true;
}

void ShmChannel::announce(std::uint32_t segment, const std::shared_ptr<SharedMemory>& memory) {
  {
    const std::lock_guard lock(announcing_);
    const auto unheard =
        std::find_if(to_announce_.begin(), to_announce_.end(),
                     [&](const Announcement& one) { return one.segment == segment; });
    if (unheard != to_announce_.end()) {
      to_announce_.erase(unheard);  // gone before the peer has heard of it
      return;
    }
    to_announce_.push_back({segment, memory});
  }
  announce_waiting();
}

// As many as the socket takes; a peer that computes for long reads none.
void ShmChannel::announce_waiting() {
  const std::lock_guard lock(announcing_);
  for (; !to_announce_.empty(); to_announce_.pop_front()) {
    const auto& [segment, memory] = to_announce_.front();
    const Signal news = memory ? Signal{Signal::heap_added, segment, memory->size()}
                               : Signal{Signal::heap_removed, segment, 0};
    if (!send(news, memory ? memory->descriptor() : -1)) break;
    if (memory) announced_.store(segment, std::memory_order_release);
    mine_.announcements.fetch_add(1, std::memory_order_release);
  }
  announcements_wait_.store(!to_announce_.empty(), std::memory_order_release);
}

void ShmChannel::read() {
  while (!hung_up_) {
    Signal signal{};
    iovec payload{&signal, sizeof(signal)};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
    msghdr message{};
    message.msg_iov = &payload;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    const ssize_t got = ::recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return;
    net::Fd descriptor;
    if (got > 0 && message.msg_controllen > 0) {
      const cmsghdr* header = CMSG_FIRSTHDR(&message);
      if (header != nullptr && header->cmsg_type == SCM_RIGHTS) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(header), sizeof(int));
        descriptor = net::Fd(fd);
      }
    }
    if (got != sizeof(signal)) {
      hung_up_ = true;
      return;
    }
    if (signal.kind == Signal::heap_added)
      peer_heap_.insert_or_assign(
          signal.segment,
          descriptor ? SharedMemory::map(std::move(descriptor), signal.bytes) : SharedMemory());
    if (signal.kind == Signal::heap_removed) removed_.push_back(signal.segment);
  }
}

}  // namespace lockstep::comm
