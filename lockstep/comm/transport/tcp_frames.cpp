#include <lockstep/comm/transport/tcp_frames.h>

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <lockstep/base/error.h>
#include <lockstep/base/hash.h>

namespace lockstep::comm {

namespace {

std::uint32_t checksum_of(FrameHeader header) {
  header.header_checksum = 0;
  return crc32c(std::as_bytes(std::span(&header, 1)));
}

}  // namespace

FrameHeader::FrameHeader(FrameKind kind, std::span<const std::byte> payload)
    : kind(kind), bytes(static_cast<std::uint32_t>(payload.size())), checksum(crc32c(payload)) {}

void FrameHeader::seal() { header_checksum = checksum_of(*this); }

bool FrameHeader::sound() const {
  return magic == kMagic && header_checksum == checksum_of(*this) && bytes <= kLargestPayload;
}

bool FrameHeader::fits(std::span<const std::byte> payload) const {
  return payload.size() == bytes && crc32c(payload) == checksum;
}

std::vector<std::byte> SpareFrames::take() {
  if (num_spare_ == 0) return {};
  return std::exchange(spare_[--num_spare_], {});
}

void SpareFrames::give(std::vector<std::byte> memory) noexcept {
  if (memory.capacity() == 0 || num_spare_ == kMost) return;
  memory.clear();
  spare_[num_spare_++] = std::move(memory);
}

void TcpSender::own(Frame& frame) {
  if (!frame.owned.empty() || frame.payload.empty()) return;
  std::vector<std::byte> memory = spare_->take();
  memory.assign(frame.payload.begin(), frame.payload.end());
  frame.owned = std::move(memory);
  frame.payload = frame.owned;
}

void TcpSender::drop_first() {
  spare_->give(std::move(frames_.front().owned));
  frames_.pop_front();
}

std::size_t TcpSender::add(const Fingerprint& call, std::span<const std::byte> message,
                           std::size_t from) {
  const auto payload = message.subspan(from, std::min(kLargestPayload, message.size() - from));
  Frame& frame = frames_.emplace_back(Frame{{FrameKind::data, payload}, payload, {}});
  frame.header.number = next_number_++;
  frame.header.message_bytes = message.size();
  frame.header.call = call;
  return from + payload.size();
}

void TcpSender::set_control(FrameKind kind, std::span<const std::byte> payload) {
  LOCKSTEP_CHECK(!inside_frame());
  control_.emplace(Frame{{kind, payload}, payload, {payload.begin(), payload.end()}});
  control_->payload = control_->owned;
}

Attempt TcpSender::write(const net::Fd& socket, std::uint64_t acknowledged) {
  Frame& frame = control_ ? *control_ : frames_[next_];
  FrameHeader& header = frame.header;
  if (!inside_frame()) {
    header.acknowledged = acknowledged;
    header.seal();
  }
  const std::size_t before = written_;
  const std::size_t total = sizeof(header) + frame.payload.size();
  while (written_ < total) {
    iovec parts[2];
    std::size_t num_parts = 0;
    if (written_ < sizeof(header))
      parts[num_parts++] = {reinterpret_cast<std::byte*>(&header) + written_,
                            sizeof(header) - written_};
    const std::size_t into = written_ > sizeof(header) ? written_ - sizeof(header) : 0;
    if (into < frame.payload.size())
      parts[num_parts++] = {const_cast<std::byte*>(frame.payload.data()) + into,
                            frame.payload.size() - into};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = num_parts;
    const ssize_t put = ::sendmsg(socket.get(), &message, MSG_NOSIGNAL);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0 && errno != EAGAIN) return Attempt::ended;
    if (put < 0) return written_ == before ? Attempt::nothing : Attempt::partly;
    written_ += static_cast<std::size_t>(put);
  }
  written_ = 0;
  if (control_) {
    control_.reset();
  } else {
    ++next_;
  }
  return Attempt::whole;
}

void TcpSender::acknowledge(std::uint64_t number) {
  while (next_ > 0 && frames_.front().header.number <= number) {
    drop_first();
    --next_;
  }
}

bool TcpSender::resume(std::uint64_t received) {
  if (received + 1 < oldest_kept() || received > num_frames()) return false;
  next_ = frames_.size();
  acknowledge(received);
  next_ = 0;
  return true;
}

void TcpSender::forget_connection() {
  written_ = 0;
  control_.reset();
}

void TcpSender::own_payloads() {
  for (Frame& frame : frames_) own(frame);
}

void TcpSender::own_half_written() {
  if (inside_frame() && !control_) own(frames_[next_]);
}

namespace {

// Bytes read together with a header are copied once more, so the buffer holds one small message.
constexpr std::size_t kBuffer = 16u << 10;
// An acknowledgement is sent by itself when this much has come and nothing went back.
constexpr std::uint64_t kAcknowledgeFrames = 16;
constexpr std::size_t kAcknowledgeBytes = 1u << 20;
// More than an ended connection can still hold: the kernel's buffers are smaller.
constexpr std::size_t kMostReadAhead = 64u << 20;
// Bounds each round of discarding: a peer that writes as fast as we read must not keep us from
// checking the clock.
constexpr std::size_t kMostDiscarded = 4u << 20;

// Reads at least `wanted` bytes, and at most `room`, to `to`; adds their number to `done`.
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
  // A held payload counts as received, even when its connection ends.
  if (phase_ != Phase::held) phase_ = Phase::between;
}

// Fills the buffer until it holds `wanted` bytes.
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
