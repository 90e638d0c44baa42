// A link over TCP between hosts. Messages travel as frames that are numbered, checksummed and kept
// until the other side has acknowledged them, so that a connection which breaks can be made again
// without losing or repeating a byte.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include <lockstep/comm/transport/endpoint.h>
#include <lockstep/comm/transport/link.h>
#include <lockstep/comm/transport/tcp_frames.h>
#include <lockstep/net/fd.h>

namespace lockstep::comm {

// How to reach a TCP link's peer outside of the link: to find out whether it is alive, and to
// connect again.

struct TcpPeer {
  std::shared_ptr<Endpoint> endpoint;  // this process's endpoint
  std::shared_ptr<Mailbox> mailbox;    // the group's mailbox
  EndpointAddress address;             // the peer's address
  std::string group_id;

  struct News {
    PeerState state = PeerState::broken;  // broken if nothing could be found out
    Notice notice;                        // the peer's notice if it aborted
    net::Fd connection;  // a new connection if the peer is alive and this side makes it
  };
  // One side makes the connection; the other side only asks about the peer's state.
  enum class Role : std::uint8_t { connects, waits };

  // Asks the peer's endpoint, as rank `self`. Throws nothing: any failure, from a name that does
  // not resolve for the moment to a lack of memory, counts as nothing found out.
  News ask(int self, Role role, Deadline deadline) const;
};

// Joins the queues of calls (Link) with the sender and the receiver of frames, and keeps up the
// connection below them. Threading as Link says. Failure: a peer's mistake is a CommError
// (mismatch, corrupted); a broken connection is no error but a state.
class TcpLink final : public Link {
 public:
  static constexpr std::size_t kFragment = kLargestPayload;

  // Takes ownership of a connection that both sides have authenticated.
  TcpLink(int self, int peer, net::Fd socket, TcpPeer reconnect,
          std::shared_ptr<SpareFrames> spare);

  bool progress() override;
  bool sends_done() const override;
  std::optional<View> try_view(const Fingerprint& call, std::size_t bytes) override;
  bool can_exchange() const override { return false; }
  void release_view() override;
  std::size_t longest_view() const override { return kFragment; }
  void begin_call() override;
  void take_connection() override;
  void end_call() override;
  void abandon_call() noexcept override;
  int descriptor() const override { return socket_.get(); }
  short wanted_events() const override;
  bool arm() override { return true; }
  void woken(short events) override;
  void repair(Deadline deadline) override;
  PeerState state() const override;
  Notice notice() const override { return notice_; }
  void send_notice(const Notice& notice) override;
  void finish_notice(Deadline deadline) override;
  void send_goodbye(Deadline deadline) override;
  const char* kind() const override { return "tcp"; }

 private:
  //   greeting ──► open ──► deaf ──► lost
  //      ▲           │        │        │      and from any of them to closed, aborted or dead
  //      └── down ◄──┴────────┴────────┘
  enum class State : std::uint8_t {
    down,      // there is no connection
    greeting,  // there is one; the peer has yet to say how many frames it has
    open,
    deaf,     // the peer takes nothing more; its last bytes, perhaps why, can be read
    lost,     // the peer has ended without a word; its last bytes are in our buffer
    closed,   // the peer has left in good order; its last bytes may be in our buffer
    aborted,  // the group is over, and notice_ says why
    dead,     // the peer's process is gone
  };

  // Whether the peer, as far as this rank knows, is at the other end.
  bool connected() const {
    return state_ == State::greeting || state_ == State::open || state_ == State::deaf;
  }
  // Whether this state is final.
  bool over() const { return state_ >= State::closed; }

  void adopt(net::Fd socket);
  void disconnect();
  void set_aborted(Notice notice);

  bool progress_in();
  Attempt read_next();
  Attempt read_greeting();
  bool find_place();
  void accept_frame();
  bool waits_for_taker() const;
  void read_ahead();
  [[noreturn]] void corrupted(const std::string& what) const;

  bool progress_out();
  bool find_frame();
  Attempt write_frame();
  bool has_unwritten() const { return !sends_.empty() || !out_.empty(); }
  bool await_greeting(const Deadline& deadline);
  bool finish_frame(const Deadline& deadline);
  void write_last_words(const Deadline& deadline);
  void hang_up(const Deadline& deadline);

  TcpPeer reconnect_;
  net::Fd socket_;
  State state_ = State::down;
  Notice notice_;
  Clock::time_point next_repair_{};
  std::optional<Notice> last_words_;
  bool last_words_begun_ = false;

  TcpSender out_;
  TcpReceiver in_;
  int damaged_frames_ = 0;  // damaged frames in a row

  struct Awaited {
    Fingerprint call;
    std::size_t bytes;
  };
  std::optional<Awaited> view_;  // the view that try_view() asked for and that has not come yet
};

}  // namespace lockstep::comm
