// The link's messages; tcp_connection.cpp looks after the connection that carries them.
#include <lockstep/comm/transport/tcp_link.h>

#include <new>

#include <lockstep/base/log.h>

namespace lockstep::comm {

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

// One step: the peer's first word, a header, or a payload.
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

// Says where the payload of the frame goes whose header is there; false where nobody has asked for
// it yet, or the one before it is still being viewed.
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
    case FrameKind::acknowledgement: break;  // was taken with the header
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

// Whether the next frame is for a call that is yet to be made here.
bool TcpLink::waits_for_taker() const {
  return in_.phase() == TcpReceiver::Phase::held ||
         (in_.phase() == TcpReceiver::Phase::header && receives_.empty() && !view_);
}

// The peer has ended while a frame of its lies unread. What comes after that frame may be a notice,
// which must not wait until somebody takes the frame.
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

// Sees to it that there is something to write; false where there is nothing.
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
  // What the peer wrote before it went, a notice perhaps, can still be read: reading finds the end.
  if (attempt == Attempt::ended) state_ = State::deaf;
  return attempt;
}

bool TcpLink::sends_done() const { return sends_.empty() && out_.data_out(); }

void TcpLink::end_call() { out_.own_payloads(); }

// A frame that is half out has to be finished before anything else can be said on this connection.
// Where there is no memory to keep it, the connection ends, and the peer asks our endpoint why.
void TcpLink::abandon_call() noexcept {
  Link::abandon_call();
  in_.divert();
  try {
    out_.own_half_written();
  } catch (const std::bad_alloc&) {
    disconnect();
  }
}

}  // namespace lockstep::comm
