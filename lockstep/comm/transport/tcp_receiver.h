// The receiving half of a TCP link.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <lockstep/comm/transport/tcp_frame.h>
#include <lockstep/net/fd.h>

namespace lockstep::comm {

// Reads frames: small ones many at a time through a buffer, the payloads of large ones straight to
// where the link wants them. Takes memory once, when it is made; only read_to_end() takes more, up
// to a bound, whatever a peer writes.
//
// Owned by its link, used by one thread at a time.
class TcpReceiver {
 public:
  enum class Phase : std::uint8_t {
    between,  // frames
    header,   // a header is there; its payload goes where place() says
    payload,  // on its way there
    held,     // a whole payload lies in scratch(), and nothing is read until it is released
  };

  TcpReceiver();

  // The connection is gone; the next one begins with a Resume.
  void forget_connection();

  // Whole once `resume` is there.
  Attempt read_resume(const net::Fd& socket, Resume& resume);

  Phase phase() const { return phase_; }
  const FrameHeader& header() const { return header_; }

  // From `between` to `header`. Damaged where the header is not sound, or not the next one's.
  Attempt read_header(const net::Fd& socket);
  // From `header` to `payload`. There must be room for header().bytes.
  void place(std::byte* target);
  // What is still to come of the payload goes nowhere: its place is about to be taken away.
  void divert();
  // From `payload` back to `between`, once it is whole and sound.
  Attempt read_payload(const net::Fd& socket);

  // Where payloads go that are viewed, or not data. Room for the largest.
  std::byte* scratch() { return scratch_.data(); }
  void hold() { phase_ = Phase::held; }
  void release() { phase_ = Phase::between; }

  // Data frames so far, on all connections.
  std::uint64_t num_received() const { return num_received_; }
  // The peer is being told num_received().
  void note_acknowledged();
  // Whether so much has come since then that the peer must be told, even if nothing else goes
  // there.
  bool owes_acknowledgement() const;

  // A peer's last words.
  struct Farewell {
    FrameKind kind;  // notice or goodbye
    std::span<const std::byte> payload;
  };
  // For a connection whose peer has ended while a frame of it waits for its place: reads all that
  // is left into the buffer, from where it is taken as before, and looks for a farewell in it.
  std::optional<Farewell> read_to_end(const net::Fd& socket);

  // Throws away what comes, for a link that will take no more frames. False at the end.
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
  std::size_t done_ = 0;  // bytes of the payload

  std::uint64_t num_received_ = 0;
  std::uint64_t num_acknowledged_ = 0;
  std::size_t unacknowledged_bytes_ = 0;
};

}  // namespace lockstep::comm
