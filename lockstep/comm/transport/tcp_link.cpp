// The link's messages come first in this file, then the connection that carries them.

#include <lockstep/comm/transport/tcp_link.h>

#include <linux/sockios.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <new>
#include <thread>

#include <lockstep/base/log.h>
#include <lockstep/net/socket.h>

namespace lockstep::comm {

TcpPeer::News TcpPeer::ask(int self, Role role, Deadline deadline) const {
  try {
    News news;
    int error = 0;
    const net::Fd asking = net::try_connect_tcp(address.tcp, deadline, error);
    if (!asking) {
      // The host answers, but no process listens at the address any more.
      if (error == ECONNREFUSED) news.state = PeerState::dead;
      return news;
    }
    auto answer = endpoint->ask(asking, group_id, deadline);
    if (answer.notice) {
      news.state = PeerState::aborted;
      news.notice = std::move(*answer.notice);
    } else if (!answer.open) {
      news.state = PeerState::closed;
    } else if (role == Role::connects) {
      news.connection = endpoint->connect(address, group_id, self, Medium::tcp, deadline);
      news.state = PeerState::alive;
    }
    return news;
  } catch (const std::exception&) {
    return {};
  }
}

namespace {

constexpr int kMostDamagedFrames = 3;

}  // namespace

TcpLink::TcpLink(int self, int peer, net::Fd socket, TcpPeer reconnect,
                 std::shared_ptr<SpareFrames> spare)
    : Link(self, peer), reconnect_(std::move(reconnect)), out_(std::move(spare)) {
  adopt(std::move(socket));
}

bool TcpLink::progress() {
  bool moved = progress_in();
  moved |= progress_out();
  return moved;
}

// ---- in ----------------------------------------------------------------------------------------

bool TcpLink::progress_in() {
  bool moved = false;
  while (socket_ && state_ != State::aborted) {
    const Attempt attempt = read_next();
    moved = moved || attempt == Attempt::whole || attempt == Attempt::partly;
    if (attempt != Attempt::whole) break;
  }
  return moved;
}

// Reads one item: the peer's greeting, a header, or a payload.
Attempt TcpLink::read_next() {
  Attempt attempt = Attempt::nothing;
  if (state_ == State::greeting) {
    attempt = read_greeting();
  } else if (in_.phase() == TcpReceiver::Phase::between) {
    attempt = in_.read_header(socket_);
    if (attempt == Attempt::whole) out_.acknowledge(in_.header().acknowledged);
  } else if (in_.phase() == TcpReceiver::Phase::payload || find_place()) {
    attempt = in_.read_payload(socket_);
    if (attempt == Attempt::whole) accept_frame();
  }
  if (attempt == Attempt::damaged) {
    log::warn("a frame from rank {} arrived damaged; asking for it again", peer());
    if (++damaged_frames_ > kMostDamagedFrames) corrupted("Frames arrive damaged again and again.");
  }
  if (attempt == Attempt::damaged || attempt == Attempt::ended) disconnect();
  return attempt;
}

Attempt TcpLink::read_greeting() {
  Resume resume;
  const Attempt attempt = in_.read_resume(socket_, resume);
  if (attempt != Attempt::whole) return attempt;
  if (resume.magic != Resume::kMagic) corrupted("The other side's greeting is malformed.");
  if (!out_.resume(resume.received))
    corrupted(fmt::format("The other side has {} frames, but {} to {} can be sent.",
                          resume.received, out_.oldest_kept(), out_.num_frames()));
  state_ = State::open;
  return attempt;
}

// Chooses where the payload of the frame goes whose header has come. False if no receive or view
// asks for it yet, or if the frame before it is still being viewed.
bool TcpLink::find_place() {
  if (in_.phase() != TcpReceiver::Phase::header) return false;
  const FrameHeader& header = in_.header();
  if (header.kind != FrameKind::data) {
    in_.place(in_.scratch());
  } else if (!receives_.empty()) {
    const Receive& receive = receives_.front();
    check_message(receive.call, receive.bytes.size(), header.call, header.message_bytes);
    if (header.bytes > receive.bytes.size() - receive.done)
      corrupted("A message has more fragments than bytes.");
    in_.place(receive.bytes.data() + receive.done);
  } else if (view_) {
    check_message(view_->call, view_->bytes, header.call, header.message_bytes);
    if (header.bytes != view_->bytes) corrupted("A message to be viewed came in fragments.");
    in_.place(in_.scratch());
  } else {
    return false;
  }
  return true;
}

void TcpLink::accept_frame() {
  const FrameHeader& header = in_.header();
  switch (header.kind) {
    case FrameKind::data:
      damaged_frames_ = 0;
      if (!receives_.empty()) {
        Receive& receive = receives_.front();
        receive.done += header.bytes;
        if (receive.done == receive.bytes.size()) receives_.pop_front();
      } else {
        in_.hold();
        view_.reset();
      }
      break;
    case FrameKind::notice: set_aborted(Notice::decode({in_.scratch(), header.bytes})); break;
    case FrameKind::goodbye: state_ = State::closed; break;
    case FrameKind::acknowledgement: break;  // it was taken with the header
  }
}

std::optional<View> TcpLink::try_view(const Fingerprint& call, std::size_t bytes) {
  if (!receives_.empty()) return std::nullopt;
  if (in_.phase() != TcpReceiver::Phase::held) {
    view_ = {call, bytes};
    progress();
  }
  if (in_.phase() != TcpReceiver::Phase::held) return std::nullopt;
  return View{in_.scratch(), nullptr};
}

void TcpLink::release_view() { in_.release(); }

// Whether the next frame belongs to a call that this rank has yet to make.
bool TcpLink::waits_for_taker() const {
  return in_.phase() == TcpReceiver::Phase::held ||
         (in_.phase() == TcpReceiver::Phase::header && receives_.empty() && !view_);
}

// The peer has ended while one of its frames is unread. A notice may follow that frame, and must
// not wait until somebody takes the frame.
void TcpLink::read_ahead() {
  const auto farewell = in_.read_to_end(socket_);
  if (!farewell) {
    state_ = State::lost;
  } else if (farewell->kind == FrameKind::notice) {
    set_aborted(Notice::decode(farewell->payload));
  } else {
    state_ = State::closed;
  }
}

void TcpLink::corrupted(const std::string& what) const {
  throw CommError({.fault = Fault::corrupted, .ranks = {peer()}, .explanation = what});
}

// ---- out ---------------------------------------------------------------------------------------

bool TcpLink::progress_out() {
  bool moved = false;
  while (state_ == State::open && find_frame()) {
    const Attempt attempt = write_frame();
    moved = moved || attempt == Attempt::whole || attempt == Attempt::partly;
    if (attempt != Attempt::whole) break;
  }
  return moved;
}

// Makes a frame to write if there is none; false if there is nothing to write.
bool TcpLink::find_frame() {
  if (!out_.empty()) return true;
  if (!sends_.empty()) {
    Send& send = sends_.front();
    send.done = out_.add(send.call, send.bytes, send.done);
    if (send.done == send.bytes.size()) sends_.pop_front();
    return true;
  }
  if (!in_.owes_acknowledgement()) return false;
  out_.set_control(FrameKind::acknowledgement);
  return true;
}

Attempt TcpLink::write_frame() {
  if (!out_.inside_frame()) in_.note_acknowledged();
  const Attempt attempt = out_.write(socket_, in_.num_received());
  // Bytes that the peer wrote before it went, perhaps a notice, can still be read up to the end.
  if (attempt == Attempt::ended) state_ = State::deaf;
  return attempt;
}

bool TcpLink::sends_done() const { return sends_.empty() && out_.data_out(); }

void TcpLink::end_call() { out_.own_payloads(); }

// A frame that is half written has to be finished before anything else can be sent on this
// connection. If there is no memory to keep it, the connection ends, and the peer asks our endpoint
// why.
void TcpLink::abandon_call() noexcept {
  Link::abandon_call();
  in_.divert();
  try {
    out_.own_half_written();
  } catch (const std::bad_alloc&) {
    disconnect();
  }
}

// The connection of a TCP link: how it is made again, and how it ends.

namespace {

constexpr milliseconds kRepairPause(50);
constexpr milliseconds kConnectTime(500);

}  // namespace

// Tells the peer how many frames we have received, and expects the peer's greeting next.
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

// The connection may not have been checked since the last call.
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

// The side that connected connects again. The other side waits for that, but asks by itself whether
// the peer's process is still there. If that finds nothing out, the next check tries again, until
// the call's deadline.
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

// ---- notice and goodbye -------------------------------------------------------------------------

// If no call has used the link yet, it may not have read the peer's greeting, which has to come
// first. True if frames can be written.
bool TcpLink::await_greeting(const Deadline& deadline) {
  while (state_ == State::greeting && read_next() != Attempt::whole)
    if (!socket_ || !net::wait_ready(socket_.get(), POLLIN, deadline)) return false;
  return state_ == State::open;
}

// For a link that takes no more frames. Discards bytes that arrive: otherwise two ends that both
// finish a frame, and read nothing, would wait for each other.
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

// Closing a socket that holds unread bytes discards the data that is still being sent, and so does
// the end of the process. So this waits, for a short while, until the other side's kernel has
// everything.
void TcpLink::hang_up(const Deadline& deadline) {
  ::shutdown(socket_.get(), SHUT_WR);
  // The counter of a connection that is over (POLLHUP, POLLERR) stays as it was, because nothing
  // drains any more.
  int unsent = 0;
  pollfd end{socket_.get(), 0, 0};
  while (::ioctl(socket_.get(), SIOCOUTQ, &unsent) == 0 && unsent > 0 && !deadline.passed() &&
         ::poll(&end, 1, 1) == 0)
    in_.discard(socket_);
}

// Sends the notice on the connection if the stream is between frames or soon will be. Otherwise the
// peer finds the connection closed and asks our endpoint, as long as this process lives.
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
    // Frames that the peer may still need go out first, over a new connection where this is broken.
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
