#include <lockstep/comm/transport/tcp_sender.h>

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>

#include <lockstep/base/error.h>

namespace lockstep::comm {

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

}  // namespace lockstep::comm
