#include <lockstep/comm/transport/tcp_receiver.h>

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace lockstep::comm {

namespace {

// What comes behind a header is copied once more, so no more of it than a small message.
constexpr std::size_t kBuffer = 16u << 10;
// An acknowledgement travels on its own when this much has come and nothing went back.
constexpr std::uint64_t kAcknowledgeFrames = 16;
constexpr std::size_t kAcknowledgeBytes = 1u << 20;
// What a connection that has ended can still hold: the kernel's buffers are smaller.
constexpr std::size_t kMostReadAhead = 64u << 20;
// A peer that writes as fast as we read must not keep us from the clock.
constexpr std::size_t kMostDiscarded = 4u << 20;

// Reads at least `wanted` bytes, and up to `room`, to `to`; `done` counts them.
Attempt read(const net::Fd& socket, std::byte* to, std::size_t wanted, std::size_t room,
             std::size_t& done) {
  const std::size_t before = done;
  while (done < wanted) {
    const ssize_t got = ::recv(socket.get(), to + done, room - done, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return done == before ? Attempt::nothing : Attempt::partly;
    if (got <= 0) return Attempt::ended;
    done += static_cast<std::size_t>(got);
  }
  return Attempt::whole;
}

}  // namespace

TcpReceiver::TcpReceiver() : buffer_(kBuffer), scratch_(kLargestPayload) {}

void TcpReceiver::forget_connection() {
  begin_ = end_ = 0;
  // What is held has been received, whatever becomes of the connection it came on.
  if (phase_ != Phase::held) phase_ = Phase::between;
}

// Sees to it that the buffer holds `wanted` bytes.
Attempt TcpReceiver::fill(const net::Fd& socket, std::size_t wanted) {
  if (buffered() >= wanted) return Attempt::whole;
  if (begin_ > 0) {
    std::memmove(buffer_.data(), buffer_.data() + begin_, buffered());
    end_ -= begin_;
    begin_ = 0;
  }
  return read(socket, buffer_.data(), wanted, buffer_.size(), end_);
}

Attempt TcpReceiver::read_resume(const net::Fd& socket, Resume& resume) {
  const Attempt attempt = fill(socket, sizeof(resume));
  if (attempt != Attempt::whole) return attempt;
  std::memcpy(&resume, buffer_.data() + begin_, sizeof(resume));
  begin_ += sizeof(resume);
  return attempt;
}

Attempt TcpReceiver::read_header(const net::Fd& socket) {
  const Attempt attempt = fill(socket, sizeof(header_));
  if (attempt != Attempt::whole) return attempt;
  std::memcpy(&header_, buffer_.data() + begin_, sizeof(header_));
  begin_ += sizeof(header_);
  if (!header_.sound()) return Attempt::damaged;
  if (header_.kind == FrameKind::data && header_.number != num_received_ + 1)
    return Attempt::damaged;
  phase_ = Phase::header;
  return attempt;
}

void TcpReceiver::place(std::byte* target) {
  target_ = target;
  done_ = 0;
  phase_ = Phase::payload;
}

void TcpReceiver::divert() {
  if (phase_ == Phase::payload) target_ = scratch();
}

Attempt TcpReceiver::read_payload(const net::Fd& socket) {
  const std::size_t size = header_.bytes;
  const std::size_t before = done_;
  const std::size_t have = std::min(size - done_, buffered());
  if (have > 0) std::memcpy(target_ + done_, buffer_.data() + begin_, have);
  begin_ += have;
  done_ += have;
  const Attempt attempt = read(socket, target_, size, size, done_);
  if (attempt == Attempt::nothing && done_ != before) return Attempt::partly;
  if (attempt != Attempt::whole) return attempt;
  if (!header_.fits({target_, size})) return Attempt::damaged;
  phase_ = Phase::between;
  if (header_.kind == FrameKind::data) {
    ++num_received_;
    unacknowledged_bytes_ += size;
  }
  return attempt;
}

void TcpReceiver::note_acknowledged() {
  num_acknowledged_ = num_received_;
  unacknowledged_bytes_ = 0;
}

bool TcpReceiver::owes_acknowledgement() const {
  return num_received_ - num_acknowledged_ >= kAcknowledgeFrames ||
         unacknowledged_bytes_ >= kAcknowledgeBytes;
}

std::optional<TcpReceiver::Farewell> TcpReceiver::read_to_end(const net::Fd& socket) {
  while (end_ < kMostReadAhead) {
    if (end_ == buffer_.size()) buffer_.resize(2 * buffer_.size());
    const Attempt attempt = read(socket, buffer_.data(), end_ + 1, buffer_.size(), end_);
    if (attempt != Attempt::whole) break;
  }
  return find_farewell();
}

std::optional<TcpReceiver::Farewell> TcpReceiver::find_farewell() const {
  std::size_t skip = 0;  // the rest of the frame that waits for its place
  if (phase_ == Phase::header) skip = header_.bytes;
  if (phase_ == Phase::payload) skip = header_.bytes - done_;
  auto rest = std::span(buffer_).subspan(begin_, buffered());
  FrameHeader header;
  while (rest.size() >= skip && rest.size() - skip >= sizeof(header)) {
    rest = rest.subspan(skip);
    std::memcpy(&header, rest.data(), sizeof(header));
    rest = rest.subspan(sizeof(header));
    if (!header.sound() || header.bytes > rest.size()) return std::nullopt;
    if (header.kind == FrameKind::notice || header.kind == FrameKind::goodbye)
      return Farewell{header.kind, rest.first(header.bytes)};
    skip = header.bytes;
  }
  return std::nullopt;
}

bool TcpReceiver::discard(const net::Fd& socket) {
  for (std::size_t total = 0; total < kMostDiscarded; total += end_) {
    begin_ = end_ = 0;
    const Attempt attempt = read(socket, buffer_.data(), 1, buffer_.size(), end_);
    if (attempt != Attempt::whole) return attempt != Attempt::ended;
  }
  return true;
}

}  // namespace lockstep::comm
