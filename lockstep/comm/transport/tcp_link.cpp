#include <lockstep/comm/transport/tcp_link.h>

#include <linux/sockios.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <lockstep/base/hash.h>
#include <lockstep/base/log.h>
#include <lockstep/net/socket.h>

namespace lockstep::comm {

namespace {

constexpr std::size_t kBuffer = 64u << 10;
// An acknowledgement travels on its own when this much has come and nothing went back.
constexpr std::uint64_t kAcknowledgeFrames = 16;
constexpr std::size_t kAcknowledgeBytes = 1u << 20;
constexpr milliseconds kRepairPause(50);
constexpr milliseconds kConnectTime(500);
constexpr int kMostChecksumFailures = 3;
// How long a rank that fails tries to finish a frame, so that it can say why.
constexpr milliseconds kNoticeTime(100);

// What a connection that has ended can still hold: the kernel's buffers are smaller.
constexpr std::size_t kMostReadAhead = 64u << 20;

constexpr std::uint32_t kFrameMagic = 0x4c53464d;
constexpr std::uint32_t kResumeMagic = 0x4c535253;

enum Kind : std::uint32_t { data = 1, acknowledgement = 2, abort_notice = 3, goodbye = 4 };

template <typename T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

}  // namespace

struct TcpLink::FrameHeader {
  std::uint32_t magic = kFrameMagic;
  std::uint32_t kind = 0;
  std::uint64_t number = 0;        // of a data frame, from 1
  std::uint64_t acknowledged = 0;  // data frames received so far
  std::uint64_t message_bytes = 0;
  Fingerprint call;
  std::uint32_t bytes = 0;     // of payload after this header
  std::uint32_t checksum = 0;  // of the payload
  std::uint32_t reserved = 0;
  std::uint32_t header_checksum = 0;

  std::uint32_t compute() const {
    FrameHeader copy = *this;
    copy.header_checksum = 0;
    return crc32c(bytes_of(copy));
  }
};

// The first thing on every connection, both ways.
struct TcpLink::Resume {
  std::uint32_t magic = kResumeMagic;
  std::uint32_t reserved = 0;
  std::uint64_t received = 0;  // data frames so far
};

struct TcpLink::Frame {
  FrameHeader header;
  std::span<const std::byte> payload;
  std::vector<std::byte> owned;  // the payload, once the call's memory must not be used any more

  void own() {
    if (!owned.empty() || payload.empty()) return;
    owned.assign(payload.begin(), payload.end());
    payload = owned;
  }
};

struct TcpLink::Receiver {
  std::vector<std::byte> buffer = std::vector<std::byte>(kBuffer);
  std::size_t begin = 0;  // unread bytes of the buffer: [begin, end)
  std::size_t end = 0;
  bool have_header = false;
  FrameHeader header;
  std::byte* target = nullptr;  // where the payload goes
  std::size_t done = 0;         // of the payload
  std::uint64_t received = 0;   // data frames
  std::uint64_t acknowledged = 0;
  std::size_t unacknowledged_bytes = 0;
  bool view_wanted = false;
  bool view_ready = false;
  Fingerprint view_call;
  std::size_t view_bytes = 0;
  std::vector<std::byte> scratch;  // for views and control frames

  std::size_t buffered() const { return end - begin; }

  void reset_connection() {
    begin = end = 0;
    have_header = false;
    target = nullptr;
    done = 0;
  }
};

TcpLink::TcpLink(int self, int peer, net::Fd socket, TcpPeer reconnect)
    : Link(self, peer),
      reconnect_(std::move(reconnect)),
      connector_(self > peer),
      in_(std::make_unique<Receiver>()) {
  in_->scratch.resize(kFragment);
  adopt(std::move(socket));
}

// A socket that is closed with unread bytes in it resets the connection, and the peer may lose the
// notice: read on until the peer has hung up as well, for a moment.
TcpLink::~TcpLink() {
  const Deadline soon = Deadline::after(kNoticeTime);
  while (told_ && socket_ && !soon.passed()) {
    const ssize_t got = ::recv(socket_.get(), in_->buffer.data(), in_->buffer.size(), 0);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) break;
    if (got < 0) ::usleep(1000);
  }
}

void TcpLink::adopt(net::Fd socket) {
  socket_ = std::move(socket);
  net::set_no_delay(socket_);
  resumed_ = false;
  deaf_ = ended_ = lost_ = false;
  in_->reset_connection();
  written_ = 0;
  control_.reset();
  const Resume resume{.received = in_->received};
  if (::send(socket_.get(), &resume, sizeof(resume), MSG_NOSIGNAL) != sizeof(resume)) disconnect();
}

void TcpLink::disconnect() {
  if (!socket_) return;
  if (end_ == PeerState::alive && resumed_)
    log::debug("connection to rank {} broke; trying to make it again", peer());
  socket_.reset();
  resumed_ = deaf_ = ended_ = lost_ = false;
  next_repair_ = Clock::now();
}

bool TcpLink::progress() {
  bool moved = false;
  if (socket_) moved |= progress_in();
  if (socket_) moved |= progress_out();
  return moved;
}

// ---- out ---------------------------------------------------------------------------------------

TcpLink::Frame TcpLink::control(std::uint32_t kind, std::span<const std::byte> payload) const {
  Frame frame;
  frame.owned.assign(payload.begin(), payload.end());
  frame.payload = frame.owned;
  frame.header.kind = kind;
  frame.header.bytes = static_cast<std::uint32_t>(payload.size());
  frame.header.checksum = crc32c(payload);
  return frame;
}

// Chooses what to write next; false where there is nothing.
bool TcpLink::next_frame() {
  if (control_ || to_send_ < unacknowledged_.size()) return true;
  if (!sends_.empty()) {
    Send& send = sends_.front();
    Frame frame;
    frame.payload =
        send.bytes.subspan(send.done, std::min(kFragment, send.bytes.size() - send.done));
    frame.header.kind = Kind::data;
    frame.header.number = next_number_++;
    frame.header.message_bytes = send.bytes.size();
    frame.header.call = send.call;
    frame.header.bytes = static_cast<std::uint32_t>(frame.payload.size());
    frame.header.checksum = crc32c(frame.payload);
    send.done += frame.payload.size();
    unacknowledged_.push_back(std::move(frame));
    if (send.done == send.bytes.size()) sends_.pop_front();
    return true;
  }
  if (in_->received - in_->acknowledged >= kAcknowledgeFrames ||
      in_->unacknowledged_bytes >= kAcknowledgeBytes) {
    control_ = std::make_unique<Frame>(control(Kind::acknowledgement, {}));
    return true;
  }
  return false;
}

// True once the current frame is out.
bool TcpLink::write_current() {
  Frame& frame = control_ ? *control_ : unacknowledged_[to_send_];
  FrameHeader& header = frame.header;
  if (written_ == 0) {
    header.acknowledged = in_->received;
    header.header_checksum = header.compute();
    in_->acknowledged = in_->received;
    in_->unacknowledged_bytes = 0;
  }
  const std::size_t total = sizeof(header) + frame.payload.size();
  while (written_ < total) {
    iovec parts[2];
    int num_parts = 0;
    if (written_ < sizeof(header))
      parts[num_parts++] = {reinterpret_cast<std::byte*>(&header) + written_,
                            sizeof(header) - written_};
    const std::size_t into = written_ > sizeof(header) ? written_ - sizeof(header) : 0;
    if (into < frame.payload.size())
      parts[num_parts++] = {const_cast<std::byte*>(frame.payload.data()) + into,
                            frame.payload.size() - into};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = static_cast<std::size_t>(num_parts);
    const ssize_t put = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL);
    if (put < 0 && errno == EINTR) continue;
    // What the peer wrote before it went, a notice perhaps, can still be read: reading finds the
    // end.
    if (put < 0 && errno != EAGAIN) deaf_ = true;
    if (put < 0) return false;
    written_ += static_cast<std::size_t>(put);
  }
  written_ = 0;
  if (control_) {
    control_.reset();
  } else {
    ++to_send_;
  }
  return true;
}

bool TcpLink::progress_out() {
  bool moved = false;
  while (resumed_ && !deaf_ && next_frame()) {
    const std::size_t before = written_;
    const bool whole = write_current();
    moved = moved || whole || written_ != before;
    if (!whole) break;
  }
  return moved;
}

bool TcpLink::sends_done() const {
  return sends_.empty() && to_send_ == unacknowledged_.size() && !control_;
}

void TcpLink::acknowledge(std::uint64_t number) {
  while (!unacknowledged_.empty() && unacknowledged_.front().header.number <= number &&
         to_send_ > 0) {
    unacknowledged_.pop_front();
    --to_send_;
  }
}

void TcpLink::end_call() {
  for (Frame& frame : unacknowledged_) frame.own();
}

// A frame that is half out has to be finished before anything else can be said.
void TcpLink::abandon_call() {
  Link::abandon_call();
  if (written_ != 0 && !control_) unacknowledged_[to_send_].own();
}

// ---- in ----------------------------------------------------------------------------------------

// Sees to it that the buffer holds `wanted` bytes; false where they have not come yet.
bool TcpLink::fill(std::size_t wanted) {
  Receiver& in = *in_;
  if (in.buffered() >= wanted) return true;
  if (in.begin > 0) {
    std::memmove(in.buffer.data(), in.buffer.data() + in.begin, in.buffered());
    in.end -= in.begin;
    in.begin = 0;
  }
  while (in.buffered() < wanted) {
    const ssize_t got =
        ::recv(socket_.get(), in.buffer.data() + in.end, in.buffer.size() - in.end, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return false;
    if (got <= 0) {
      disconnect();
      return false;
    }
    in.end += static_cast<std::size_t>(got);
  }
  return true;
}

bool TcpLink::read_resume() {
  Resume resume;
  if (!fill(sizeof(resume))) return false;
  std::memcpy(&resume, in_->buffer.data() + in_->begin, sizeof(resume));
  if (resume.magic != kResumeMagic) corrupted("The other side's greeting is malformed.");
  in_->begin += sizeof(resume);
  const std::uint64_t oldest =
      unacknowledged_.empty() ? next_number_ : unacknowledged_.front().header.number;
  if (resume.received + 1 < oldest || resume.received >= next_number_)
    corrupted(fmt::format("The other side has {} frames, but {} to {} can be sent.",
                          resume.received, oldest, next_number_ - 1));
  to_send_ = unacknowledged_.size();
  acknowledge(resume.received);
  to_send_ = 0;
  resumed_ = true;
  return true;
}

bool TcpLink::read_header() {
  Receiver& in = *in_;
  if (!fill(sizeof(in.header))) return false;
  std::memcpy(&in.header, in.buffer.data() + in.begin, sizeof(in.header));
  in.begin += sizeof(in.header);
  const bool sound = in.header.magic == kFrameMagic &&
                     in.header.header_checksum == in.header.compute() &&
                     in.header.bytes <= kFragment &&
                     (in.header.kind != Kind::data || in.header.number == in.received + 1);
  if (!sound) {
    if (++checksum_failures_ > kMostChecksumFailures)
      corrupted("Frames arrive with damaged headers again and again.");
    disconnect();
    return false;
  }
  acknowledge(in.header.acknowledged);
  in.have_header = true;
  in.done = 0;
  in.target = nullptr;
  return true;
}

// Reads as much of the payload as is there; true once it is whole.
bool TcpLink::read_payload() {
  Receiver& in = *in_;
  const std::size_t size = in.header.bytes;
  if (in.target == nullptr) {
    if (in.header.kind != Kind::data) {
      in.target = in.scratch.data();
    } else if (!receives_.empty()) {
      const Receive& receive = receives_.front();
      check_message(receive.call, receive.bytes.size(), in.header.call, in.header.message_bytes);
      if (size > receive.bytes.size() - receive.done)
        corrupted("A message has more fragments than bytes.");
      // An empty message needs somewhere to point, too.
      in.target = size > 0 ? receive.bytes.data() + receive.done : in.scratch.data();
    } else if (in.view_wanted) {
      check_message(in.view_call, in.view_bytes, in.header.call, in.header.message_bytes);
      if (size != in.view_bytes) corrupted("A message to be viewed came in fragments.");
      in.target = in.scratch.data();
    } else {
      return false;
    }
  }
  const std::size_t have = std::min(size - in.done, in.buffered());
  if (have > 0) std::memcpy(in.target + in.done, in.buffer.data() + in.begin, have);
  in.begin += have;
  in.done += have;
  while (in.done < size) {
    const ssize_t got = ::recv(socket_.get(), in.target + in.done, size - in.done, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return false;
    if (got <= 0) {
      disconnect();
      return false;
    }
    in.done += static_cast<std::size_t>(got);
  }
  if (crc32c({in.target, size}) != in.header.checksum) {
    log::warn("a frame from rank {} arrived damaged; asking for it again", peer());
    if (++checksum_failures_ > kMostChecksumFailures)
      corrupted("Frames arrive damaged again and again.");
    disconnect();
    return false;
  }
  return true;
}

void TcpLink::accept_frame() {
  Receiver& in = *in_;
  in.have_header = false;
  if (in.header.kind != Kind::data) return control_frame();
  ++in.received;
  in.unacknowledged_bytes += in.header.bytes;
  checksum_failures_ = 0;
  if (!receives_.empty()) {
    Receive& receive = receives_.front();
    receive.done += in.header.bytes;
    if (receive.done == receive.bytes.size()) receives_.pop_front();
  } else {
    in.view_ready = true;
    in.view_wanted = false;
  }
}

void TcpLink::control_frame() {
  switch (in_->header.kind) {
    case Kind::abort_notice:
      notice_ = Notice::decode({in_->scratch.data(), in_->header.bytes});
      end_ = PeerState::aborted;
      break;
    case Kind::goodbye: end_ = PeerState::closed; break;
    default: break;  // an acknowledgement was taken with the header
  }
}

bool TcpLink::progress_in() {
  bool moved = false;
  while (socket_) {
    if (!resumed_) {
      if (!read_resume()) break;
    } else if (!in_->have_header) {
      // A frame that is viewed holds the scratch: nothing more is read until it is given back.
      if (in_->view_ready || !read_header()) break;
    } else {
      const std::size_t before = in_->done;
      if (!read_payload()) {
        moved = moved || in_->done != before;
        break;
      }
      accept_frame();
    }
    moved = true;
  }
  return moved;
}

std::optional<View> TcpLink::try_view(const Fingerprint& call, std::size_t bytes) {
  if (!receives_.empty()) return std::nullopt;
  if (!in_->view_ready) {
    in_->view_wanted = true;
    in_->view_call = call;
    in_->view_bytes = bytes;
    progress();
  }
  if (!in_->view_ready) return std::nullopt;
  return View{in_->scratch.data(), nullptr};
}

void TcpLink::release_view() { in_->view_ready = false; }

void TcpLink::corrupted(const std::string& what) const {
  throw CommError({.fault = Fault::corrupted, .ranks = {peer()}, .explanation = what});
}

// ---- the connection ----------------------------------------------------------------------------

// Nobody may have looked at the connection since the last call.
void TcpLink::begin_call() {
  take_connection();
  if (!socket_ || ended_) return;
  pollfd polled{socket_.get(), POLLRDHUP, 0};
  if (::poll(&polled, 1, 0) > 0) woken(polled.revents);
}

void TcpLink::take_connection() {
  if (net::Fd again = reconnect_.mailbox->take(peer(), Deadline::after(milliseconds(0)))) {
    disconnect();
    adopt(std::move(again));
  }
}

// Whether the next frame is for a call that is yet to be made here.
bool TcpLink::waits_for_taker() const {
  return in_->view_ready ||
         (in_->have_header && in_->target == nullptr && receives_.empty() && !in_->view_wanted);
}

short TcpLink::wanted_events() const {
  if (!socket_) return 0;
  short events = POLLIN;
  if (waits_for_taker()) events = ended_ ? 0 : POLLRDHUP;
  if (resumed_ && !deaf_ && !sends_done()) events |= POLLOUT;
  return events;
}

void TcpLink::woken(short events) {
  progress();
  if (socket_ && waits_for_taker() && !ended_ && (events & (POLLRDHUP | POLLHUP | POLLERR)) != 0)
    read_ahead();
}

// The peer has ended while a frame of its lies unread. What comes after that frame may be a notice,
// which must not wait until somebody takes the frame.
void TcpLink::read_ahead() {
  Receiver& in = *in_;
  while (!ended_ && in.end < kMostReadAhead) {
    if (in.end == in.buffer.size()) in.buffer.resize(2 * in.buffer.size());
    const ssize_t got =
        ::recv(socket_.get(), in.buffer.data() + in.end, in.buffer.size() - in.end, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    in.end += static_cast<std::size_t>(got);
  }
  ended_ = true;
  lost_ = true;
  std::size_t at = in.begin + (in.have_header ? in.header.bytes - in.done : 0);
  FrameHeader header;
  while (at + sizeof(header) <= in.end) {
    std::memcpy(&header, in.buffer.data() + at, sizeof(header));
    at += sizeof(header);
    if (header.magic != kFrameMagic || header.header_checksum != header.compute() ||
        header.bytes > in.end - at)
      return;
    if (header.kind == Kind::goodbye) lost_ = false;
    if (header.kind == Kind::abort_notice) {
      lost_ = false;
      notice_ = Notice::decode({in.buffer.data() + at, header.bytes});
      end_ = PeerState::aborted;
    }
    at += header.bytes;
  }
}

// The side that connected connects again; the other side waits for that, but finds out for itself
// whether there is still a process to wait for.
void TcpLink::repair(Deadline deadline) {
  if (end_ != PeerState::alive) return;
  take_connection();
  if ((socket_ && !lost_) || Clock::now() < next_repair_) return;
  next_repair_ = Clock::now() + kRepairPause;
  const Deadline soon =
      Deadline::after(std::min<Clock::duration>(kConnectTime, deadline.remaining()));
  int error = 0;
  net::Fd probe = net::try_connect_tcp(reconnect_.address.tcp, soon, error);
  if (error == ECONNREFUSED) {
    end_ = PeerState::dead;  // its host answers, but nobody listens any more
    return;
  }
  if (!probe) return;
  try {
    const auto answer = reconnect_.endpoint->ask(probe, reconnect_.group_id, soon);
    if (answer.notice) {
      notice_ = *answer.notice;
      end_ = PeerState::aborted;
    } else if (!answer.open) {
      end_ = PeerState::closed;
    } else if (connector_) {
      adopt(reconnect_.endpoint->connect(reconnect_.address, reconnect_.group_id, self(),
                                         Medium::tcp, soon));
    }
  } catch (const CommError&) {
    // Tried again at the next look, until the call's deadline.
  }
}

PeerState TcpLink::state() const {
  if (end_ != PeerState::alive) return end_;
  return socket_ && !lost_ ? PeerState::alive : PeerState::broken;
}

// A link that no call has used yet may not have read the peer's first word, which nothing may
// precede.
bool TcpLink::await_resume(Deadline deadline) {
  while (socket_ && !resumed_ && !read_resume()) {
    if (!socket_ || !net::wait_ready(socket_.get(), POLLIN, deadline)) return false;
  }
  return static_cast<bool>(socket_);
}

// In band where the stream is between frames or soon will be; otherwise the peer finds the
// connection closed, and asks our endpoint.
void TcpLink::send_notice(const Notice& notice) {
  reconnect_.endpoint->close(reconnect_.group_id, notice);
  const Deadline soon = Deadline::after(kNoticeTime);
  try {
    if (!await_resume(soon)) return;
    while (!deaf_ && written_ != 0 && !write_current() && !soon.passed())
      net::wait_ready(socket_.get(), POLLOUT, soon);
    if (written_ == 0) {
      control_ = std::make_unique<Frame>(control(Kind::abort_notice, notice.encode()));
      write_current();
    }
    ::shutdown(socket_.get(), SHUT_WR);
    told_ = true;
  } catch (const Error& error) {
    log::debug("telling rank {}: {}", peer(), error.what());
  }
}

// Closing a socket that holds unread bytes throws away what is still on its way out: so wait, for a
// short while, until the other side's kernel has everything.
void TcpLink::send_goodbye(Deadline deadline) {
  if (end_ == PeerState::aborted || end_ == PeerState::dead) return;
  try {
    if (!await_resume(deadline)) return;
    while (socket_ && resumed_ && !deaf_ && !sends_done() && !deadline.passed()) {
      if (!progress()) net::wait_ready(socket_.get(), POLLOUT, Deadline::after(milliseconds(10)));
    }
    if (!socket_ || !resumed_ || deaf_ || written_ != 0) return;
    control_ = std::make_unique<Frame>(control(Kind::goodbye, {}));
    write_current();
    ::shutdown(socket_.get(), SHUT_WR);
    // A connection that is over (POLLHUP, POLLERR) keeps the count it had: it will not drain any
    // more.
    int unsent = 0;
    pollfd over{socket_.get(), 0, 0};
    while (::ioctl(socket_.get(), SIOCOUTQ, &unsent) == 0 && unsent > 0 && !deadline.passed() &&
           ::poll(&over, 1, 1) == 0) {
    }
  } catch (const Error& error) {
    log::debug("leaving rank {}: {}", peer(), error.what());
  }
}

}  // namespace lockstep::comm
