// The sending half of a TCP link.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <lockstep/comm/transport/spare_frames.h>
#include <lockstep/comm/transport/tcp_frame.h>
#include <lockstep/net/fd.h>

namespace lockstep::comm {

// Cuts messages into frames, writes them in order, and keeps each until the peer has acknowledged
// it, so that a new connection can carry on where the last one broke. A control frame goes between
// two data frames and is not kept.
//
//   frames_:   [ written, not acknowledged | being written | to be written ]
//                                           ^ next_, and written_ bytes of it
//
// Owned by its link, used by one thread at a time. Payloads are referred to, not copied, until
// own_payloads(). Nothing here throws but std::bad_alloc.
class TcpSender {
 public:
  explicit TcpSender(std::shared_ptr<SpareFrames> spare) : spare_(std::move(spare)) {}

  // Makes a frame of the piece of a message that begins at byte `from`; returns where it ends.
  std::size_t add(const Fingerprint& call, std::span<const std::byte> message, std::size_t from);

  // Has a control frame written before any other. Only where the stream stands between frames; one
  // that has not been begun is replaced.
  void set_control(FrameKind kind, std::span<const std::byte> payload = {});

  bool control_out() const { return !control_; }
  // Whether every data frame is out.
  bool data_out() const { return next_ == frames_.size(); }
  bool empty() const { return data_out() && !control_; }
  // Whether the stream stands inside a frame: nothing else can be said before it is out.
  bool inside_frame() const { return written_ != 0; }

  // Writes what the socket takes of the next frame, which must exist. `acknowledged` is for the
  // header, and used where a frame begins.
  Attempt write(const net::Fd& socket, std::uint64_t acknowledged);

  // The peer has these frames: they need not be kept.
  void acknowledge(std::uint64_t number);

  // A new connection, on which the peer says how much it has; the rest goes out again. False where
  // that cannot be: it has frames that were never sent, or lacks some that it acknowledged.
  bool resume(std::uint64_t received);
  // The connection is gone, and what was written of the current frame with it.
  void forget_connection();

  // Copies the payloads that are kept: nothing refers to a caller's memory afterwards.
  void own_payloads();
  // The same for a call that failed, whose frames will never be sent but for one that is half out.
  void own_half_written();

  // Whether there are frames that the peer may not have.
  bool keeps_any() const { return !frames_.empty(); }
  std::uint64_t num_frames() const { return next_number_ - 1; }
  std::uint64_t oldest_kept() const {
    return frames_.empty() ? next_number_ : frames_.front().header.number;
  }

 private:
  struct Frame {
    FrameHeader header;
    std::span<const std::byte> payload;
    std::vector<std::byte> owned;  // where the payload is, once own()ed
  };

  void own(Frame& frame);
  void drop_first();

  std::deque<Frame> frames_;
  std::size_t next_ = 0;          // index of the first frame that is not out
  std::optional<Frame> control_;  // being written, or next
  std::size_t written_ = 0;       // bytes of the frame being written
  std::uint64_t next_number_ = 1;
  std::shared_ptr<SpareFrames> spare_;
};

}  // namespace lockstep::comm
