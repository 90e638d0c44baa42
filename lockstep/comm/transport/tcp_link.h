// A link over TCP between hosts. Messages travel as frames that are numbered, checksummed and kept
// until the other side has acknowledged them, so that a connection which breaks can be made again
// without losing or repeating a byte.
#pragma once

#include <memory>
#include <vector>

#include <lockstep/comm/transport/endpoint.h>
#include <lockstep/comm/transport/link.h>
#include <lockstep/net/fd.h>

namespace lockstep::comm {

// What it takes to connect again.
struct TcpPeer {
  std::shared_ptr<Endpoint> endpoint;  // ours
  std::shared_ptr<Mailbox> mailbox;    // of the group
  EndpointAddress address;             // theirs
  std::string group_id;
};

class TcpLink final : public Link {
 public:
  // Messages travel in pieces of at most this.
  static constexpr std::size_t kFragment = 256u << 10;

  // Takes over a connection that both sides have authenticated.
  TcpLink(int self, int peer, net::Fd socket, TcpPeer reconnect);
  ~TcpLink() override;

  bool progress() override;
  bool sends_done() const override;
  std::optional<View> try_view(const Fingerprint& call, std::size_t bytes) override;
  bool can_exchange() const override { return false; }
  void release_view() override;
  std::size_t longest_view() const override { return kFragment; }
  void begin_call() override;
  void take_connection() override;
  void end_call() override;
  void abandon_call() override;
  int descriptor() const override { return socket_.get(); }
  short wanted_events() const override;
  bool arm() override { return true; }
  void woken(short events) override;
  void repair(Deadline deadline) override;
  PeerState state() const override;
  Notice notice() const override { return notice_; }
  void send_notice(const Notice& notice) override;
  void send_goodbye(Deadline deadline) override;
  const char* kind() const override { return "tcp"; }

 private:
  struct FrameHeader;
  struct Resume;
  struct Frame;
  struct Receiver;

  // A connection (again): tells the peer how far we got, and waits to hear how far it did.
  void adopt(net::Fd socket);
  void disconnect();
  bool progress_in();
  bool progress_out();
  bool next_frame();
  bool write_current();
  bool fill(std::size_t wanted);
  bool read_resume();
  bool await_resume(Deadline deadline);
  bool read_header();
  bool read_payload();
  void accept_frame();
  bool waits_for_taker() const;
  void read_ahead();
  void control_frame();
  void acknowledge(std::uint64_t number);
  Frame control(std::uint32_t kind, std::span<const std::byte> payload) const;
  [[noreturn]] void corrupted(const std::string& what) const;

  TcpPeer reconnect_;
  net::Fd socket_;
  bool connector_;  // this side makes the connection
  bool resumed_ = false;
  bool deaf_ = false;  // the peer takes nothing more on this connection; it may still have said why
  bool ended_ = false;  // everything that will ever come on this connection is in the buffer
  bool lost_ = false;   // and it ends without a word of why
  PeerState end_ = PeerState::alive;  // closed, aborted or dead once known
  Notice notice_;
  bool told_ = false;  // our own notice is on its way
  Clock::time_point next_repair_{};
  int checksum_failures_ = 0;

  std::deque<Frame> unacknowledged_;
  std::size_t to_send_ = 0;         // index into unacknowledged_ of the first frame not written
  std::size_t written_ = 0;         // bytes of the frame being written
  std::unique_ptr<Frame> control_;  // being written instead, between frames
  std::uint64_t next_number_ = 1;

  std::unique_ptr<Receiver> in_;
};

}  // namespace lockstep::comm
