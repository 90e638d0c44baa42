// The bytes that travel over a TCP link, which are the word that opens every connection and frames
// after it; and the two halves of a link, which write and read them. Numbers are little-endian, as
// on every machine this runs on.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <lockstep/comm/operations/operation.h>
#include <lockstep/net/fd.h>

namespace lockstep::comm {

// Messages travel in pieces of at most this.
constexpr std::size_t kLargestPayload = 256u << 10;

// The first message on every connection, in both directions: how many frames have arrived on
// earlier connections.
struct Resume {
  static constexpr std::uint32_t kMagic = 0x4c535253;

  std::uint32_t magic = kMagic;
  std::uint32_t reserved = 0;
  std::uint64_t received = 0;  // data frames received so far, on all connections
};
static_assert(sizeof(Resume) == 16);

// Data frames are numbered and kept until acknowledged; the other kinds are neither.
enum class FrameKind : std::uint32_t { data = 1, acknowledgement = 2, notice = 3, goodbye = 4 };

// Precedes every payload. Every frame acknowledges all data frames received so far.
struct FrameHeader {
  static constexpr std::uint32_t kMagic = 0x4c53464d;

  std::uint32_t magic = kMagic;
  FrameKind kind = FrameKind::data;
  std::uint64_t number = 0;  // number of a data frame, from 1
  std::uint64_t acknowledged = 0;
  std::uint64_t message_bytes = 0;  // length of the whole message that a data frame is a piece of
  Fingerprint call;
  std::uint32_t bytes = 0;     // bytes of the payload
  std::uint32_t checksum = 0;  // checksum of the payload
  std::uint32_t reserved = 0;
  std::uint32_t header_checksum = 0;

  FrameHeader() = default;
  FrameHeader(FrameKind kind, std::span<const std::byte> payload);

  // Sets the checksum to that of the other fields.
  void seal();
  // Whether this is a header as a peer writes it. No field of one that is not sound may be used,
  // its size least of all.
  bool sound() const;
  bool fits(std::span<const std::byte> payload) const;
};
static_assert(sizeof(FrameHeader) == 80);

// The outcome of an attempt to read or write without waiting.
enum class Attempt : std::uint8_t {
  whole,    // all of it
  partly,   // some of it; the rest comes later
  nothing,  // none of it for now
  ended,    // the connection takes, or gives, no more
  damaged,  // the bytes that came are not those that were sent
};

// Reuses the memory of finished frames: otherwise the allocator would give pieces of that size back
// to the kernel and fetch them again page by page. The links of a group share it, and one thread
// uses it at a time.
class SpareFrames {
 public:
  // Returns an empty vector, with some capacity if there is any.
  std::vector<std::byte> take();
  void give(std::vector<std::byte> memory) noexcept;

 private:
  static constexpr std::size_t kMost = 16;

  std::array<std::vector<std::byte>, kMost> spare_;
  std::size_t num_spare_ = 0;
};

// The sending half of a TCP link cuts messages into frames, writes them in order, and keeps each
// until the peer has acknowledged it, so that a new connection can carry on where the last one
// broke. A control frame goes between two data frames and is not kept.
//
//   frames_:   [ written, not acknowledged | being written | to be written ]
//                                           ^ next_, and written_ bytes of it
//
// Owned by its link, used by one thread at a time. Payloads are referred to, not copied, until
// own_payloads(). Only std::bad_alloc is thrown here.
class TcpSender {
 public:
  explicit TcpSender(std::shared_ptr<SpareFrames> spare) : spare_(std::move(spare)) {}

  // Makes a frame of the piece of a message that begins at byte `from`; returns where it ends.
  std::size_t add(const Fingerprint& call, std::span<const std::byte> message, std::size_t from);

  // Queues a control frame before any other. Allowed only while the stream stands between frames; a
  // control frame that has not been begun is replaced.
  void set_control(FrameKind kind, std::span<const std::byte> payload = {});

  bool control_out() const { return !control_; }
  // Whether every data frame has been written.
  bool data_out() const { return next_ == frames_.size(); }
  bool empty() const { return data_out() && !control_; }
  // Whether the stream stands inside a frame, which has to be finished before anything else is
  // written.
  bool inside_frame() const { return written_ != 0; }

  // Writes as much of the next frame, which must exist, as the socket takes. `acknowledged` goes
  // into the header when a frame begins.
  Attempt write(const net::Fd& socket, std::uint64_t acknowledged);

  // Releases the frames that the peer has.
  void acknowledge(std::uint64_t number);

  // Begins a new connection, on which the peer says how many frames it has; the others are sent
  // again. False if that is impossible: it has frames that were never sent, or lacks some that it
  // acknowledged.
  bool resume(std::uint64_t received);
  // The connection is gone, and with it the written part of the current frame.
  void forget_connection();

  // Copies the payloads of the frames that are kept: nothing refers to a caller's memory
  // afterwards.
  void own_payloads();
  // The same for a call that failed: of its frames only one that is partly written is still sent.
  void own_half_written();

  // Whether there are frames that the peer may not have yet.
  bool keeps_any() const { return !frames_.empty(); }
  std::uint64_t num_frames() const { return next_number_ - 1; }
  std::uint64_t oldest_kept() const {
    return frames_.empty() ? next_number_ : frames_.front().header.number;
  }

 private:
  struct Frame {
    FrameHeader header;
    std::span<const std::byte> payload;
    std::vector<std::byte> owned;  // holds the payload, once own()ed
  };

  void own(Frame& frame);
  void drop_first();

  std::deque<Frame> frames_;
  std::size_t next_ = 0;          // index of the first frame that is not written
  std::optional<Frame> control_;  // being written, or written next
  std::size_t written_ = 0;       // bytes of the frame being written
  std::uint64_t next_number_ = 1;
  std::shared_ptr<SpareFrames> spare_;
};

// The receiving half of a TCP link reads frames: small ones many at a time through a buffer, the
// payloads of large ones straight to where the link wants them. Takes memory once, in its
// constructor; only read_to_end() takes more, up to a bound, whatever a peer writes.
//
// Owned by its link, used by one thread at a time.
class TcpReceiver {
 public:
  enum class Phase : std::uint8_t {
    between,  // between two frames
    header,   // the header has come; its payload goes where place() says
    payload,  // the payload is being read
    held,     // a whole payload is in scratch(), and nothing is read until it is released
  };

  TcpReceiver();

  // Notes that the connection is gone; the next one begins with a Resume.
  void forget_connection();

  // Returns `whole` once `resume` has been read.
  Attempt read_resume(const net::Fd& socket, Resume& resume);

  Phase phase() const { return phase_; }
  const FrameHeader& header() const { return header_; }

  // Goes from `between` to `header`. Returns `damaged` if the header is not sound, or not the next
  // frame's.
  Attempt read_header(const net::Fd& socket);
  // Goes from `header` to `payload`. `target` must have room for header().bytes.
  void place(std::byte* target);
  // Discards the rest of the payload, because its memory is about to be taken away.
  void divert();
  // Goes from `payload` back to `between`, once the payload is whole and sound.
  Attempt read_payload(const net::Fd& socket);

  // Room for the largest payload: payloads that are viewed, or are not data, go here.
  std::byte* scratch() { return scratch_.data(); }
  void hold() { phase_ = Phase::held; }
  void release() { phase_ = Phase::between; }

  // The number of data frames received so far, on all connections.
  std::uint64_t num_received() const { return num_received_; }
  // Notes that the peer is being told num_received().
  void note_acknowledged();
  // Whether so much has come since then that the peer must be told, even if nothing else is sent to
  // it.
  bool owes_acknowledgement() const;

  // A peer's last frame.
  struct Farewell {
    FrameKind kind;  // notice or goodbye
    std::span<const std::byte> payload;
  };
  // For a connection whose peer has ended while one of its frames waits for memory: reads the rest
  // into the buffer, from which frames are taken as before, and looks for a farewell in it.
  std::optional<Farewell> read_to_end(const net::Fd& socket);

  // Discards all bytes that arrive, for a link that will take no more frames. False at the end.
  bool discard(const net::Fd& socket);

 private:
  std::size_t buffered() const { return end_ - begin_; }
  Attempt fill(const net::Fd& socket, std::size_t wanted);
  std::optional<Farewell> find_farewell() const;

  std::vector<std::byte> buffer_;
  std::size_t begin_ = 0;  // unread bytes of the buffer: [begin_, end_)
  std::size_t end_ = 0;
  std::vector<std::byte> scratch_;

  Phase phase_ = Phase::between;
  FrameHeader header_;
  std::byte* target_ = nullptr;
  std::size_t done_ = 0;  // bytes of the payload read so far

  std::uint64_t num_received_ = 0;
  std::uint64_t num_acknowledged_ = 0;
  std::size_t unacknowledged_bytes_ = 0;
};

}  // namespace lockstep::comm
