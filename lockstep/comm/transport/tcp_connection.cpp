// A TCP link's connection: how it is made again, and how it ends.
#include <linux/sockios.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <thread>

#include <lockstep/base/log.h>
#include <lockstep/comm/transport/tcp_link.h>
#include <lockstep/net/socket.h>

namespace lockstep::comm {

namespace {

constexpr milliseconds kRepairPause(50);
constexpr milliseconds kConnectTime(500);

}  // namespace

// Tells the peer how far we got, and has the next bytes read as its answer to that.
void TcpLink::adopt(net::Fd socket) {
  socket_ = std::move(socket);
  net::set_no_delay(socket_);
  state_ = State::greeting;
  in_.forget_connection();
  out_.forget_connection();
  const Resume resume{.received = in_.num_received()};
  if (::send(socket_.get(), &resume, sizeof(resume), MSG_NOSIGNAL) != sizeof(resume)) disconnect();
}

void TcpLink::disconnect() {
  if (!socket_) return;
  socket_.reset();
  if (over()) return;
  if (state_ != State::greeting)
    log::debug("connection to rank {} broke; trying to make it again", peer());
  state_ = State::down;
  next_repair_ = Clock::now();
}

void TcpLink::set_aborted(Notice notice) {
  state_ = State::aborted;
  notice_ = std::move(notice);
}

PeerState TcpLink::state() const {
  switch (state_) {
    case State::down:
    case State::lost: return PeerState::broken;
    case State::closed: return PeerState::closed;
    case State::aborted: return PeerState::aborted;
    case State::dead: return PeerState::dead;
    default: return PeerState::alive;
  }
}

// Nobody may have looked at the connection since the last call.
void TcpLink::begin_call() {
  take_connection();
  if (!connected()) return;
  pollfd polled{socket_.get(), POLLRDHUP, 0};
  if (::poll(&polled, 1, 0) > 0) woken(polled.revents);
}

void TcpLink::take_connection() {
  net::Fd again = reconnect_.mailbox->take(peer(), Deadline::after(milliseconds(0)));
  if (!again || over()) return;
  disconnect();
  adopt(std::move(again));
}

short TcpLink::wanted_events() const {
  if (!socket_ || state_ == State::aborted) return 0;
  short events = POLLIN;
  if (state_ != State::greeting && waits_for_taker()) events = connected() ? POLLRDHUP : 0;
  if (state_ == State::open && has_unwritten()) events |= POLLOUT;
  return events;
}

void TcpLink::woken(short events) {
  progress();
  if (connected() && waits_for_taker() && (events & (POLLRDHUP | POLLHUP | POLLERR)) != 0)
    read_ahead();
}

// The side that connected connects again; the other side waits for that, but finds out for itself
// whether there is still a process to wait for. Where nothing is found out, the next look tries
// again, until the call's deadline.
void TcpLink::repair(Deadline deadline) {
  take_connection();
  if (state() != PeerState::broken || Clock::now() < next_repair_) return;
  next_repair_ = Clock::now() + kRepairPause;
  const auto role = self() > peer() ? TcpPeer::Role::connects : TcpPeer::Role::waits;
  TcpPeer::News news = reconnect_.ask(
      self(), role, Deadline::after(std::min<Clock::duration>(kConnectTime, deadline.remaining())));
  switch (news.state) {
    case PeerState::broken: break;
    case PeerState::alive: adopt(std::move(news.connection)); break;
    case PeerState::closed: state_ = State::closed; break;
    case PeerState::aborted: set_aborted(std::move(news.notice)); break;
    case PeerState::dead: state_ = State::dead; break;
  }
}

// ---- the last words ----------------------------------------------------------------------------

// A link that no call has used yet may not have read the peer's first word, which nothing may
// precede. True where frames can be written.
bool TcpLink::await_greeting(const Deadline& deadline) {
  while (state_ == State::greeting && read_next() != Attempt::whole)
    if (!socket_ || !net::wait_ready(socket_.get(), POLLIN, deadline)) return false;
  return state_ == State::open;
}

// For a link that takes no more frames. What comes is thrown away: a peer that does the same, and
// is read by nobody, would wait for us as we do for it.
bool TcpLink::finish_frame(const Deadline& deadline) {
  constexpr milliseconds kSlice(5);
  while (true) {
    const Attempt attempt = write_frame();
    if (attempt == Attempt::whole) return true;
    if (attempt == Attempt::ended || deadline.passed()) return false;
    in_.discard(socket_);
    net::wait_ready(socket_.get(), POLLOUT,
                    Deadline::after(std::min<Clock::duration>(kSlice, deadline.remaining())));
  }
}

// Closing a socket that holds unread bytes throws away what is still on its way out, and so does
// the end of a process: wait, for a short while, until the other side's kernel has everything.
void TcpLink::hang_up(const Deadline& deadline) {
  ::shutdown(socket_.get(), SHUT_WR);
  // A connection that is over (POLLHUP, POLLERR) keeps the count it had: it will not drain any
  // more.
  int unsent = 0;
  pollfd end{socket_.get(), 0, 0};
  while (::ioctl(socket_.get(), SIOCOUTQ, &unsent) == 0 && unsent > 0 && !deadline.passed() &&
         ::poll(&end, 1, 1) == 0)
    in_.discard(socket_);
}

// In band where the stream is between frames or soon will be; otherwise the peer finds the
// connection closed, and asks our endpoint, as long as this process lives.
void TcpLink::send_notice(const Notice& notice) {
  last_words_ = notice;
  try {
    reconnect_.endpoint->close(reconnect_.group_id, notice);
    write_last_words(Deadline::after(milliseconds(0)));
  } catch (const std::exception& error) {
    log::debug("telling rank {}: {}", peer(), error.what());
  }
}

void TcpLink::finish_notice(Deadline deadline) {
  try {
    write_last_words(deadline);
    if (state_ == State::open) hang_up(deadline);
  } catch (const std::exception& error) {
    log::debug("telling rank {}: {}", peer(), error.what());
  }
  if (!over()) set_aborted(*last_words_);
}

void TcpLink::write_last_words(const Deadline& deadline) {
  if (!await_greeting(deadline)) return;
  if (!last_words_begun_) {
    if (out_.inside_frame() && !finish_frame(deadline)) return;
    out_.set_control(FrameKind::notice, last_words_->encode());
    last_words_begun_ = true;
  }
  if (!out_.control_out()) finish_frame(deadline);
}

void TcpLink::send_goodbye(Deadline deadline) {
  try {
    // What the peer may still need goes out first, over a new connection where this one is broken.
    while (!over() && !deadline.passed()) {
      const bool broken = state() == PeerState::broken;
      if (!has_unwritten() && !(broken && out_.keeps_any())) break;
      if (broken) {
        repair(deadline);
        std::this_thread::sleep_for(milliseconds(5));
      } else if (!progress()) {
        net::wait_ready(socket_.get(), static_cast<short>(POLLIN | POLLOUT),
                        Deadline::after(milliseconds(10)));
      }
    }
    if (!await_greeting(deadline)) return;
    if (state_ != State::open || out_.inside_frame()) return;
    out_.set_control(FrameKind::goodbye);
    write_frame();
    hang_up(deadline);
  } catch (const std::exception& error) {
    log::debug("leaving rank {}: {}", peer(), error.what());
  }
}

}  // namespace lockstep::comm
