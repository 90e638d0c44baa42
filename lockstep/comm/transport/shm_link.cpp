#include <lockstep/comm/transport/shm_link.h>

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <lockstep/comm/transport/heavy_fence.h>
#include <lockstep/net/socket.h>

namespace lockstep::comm {

// The first page of a segment: the state of its owner, for all peers to read.
struct ShmControl {
  alignas(64) std::atomic<std::uint32_t> sleeping;  // set by the owner, cleared by who rings
  std::uint32_t heavy_fences;  // the owner makes one before it sleeps; fixed from the start
  alignas(64) std::atomic<std::uint32_t> announcements;  // signals of heap changes sent so far
  alignas(64) std::atomic<std::uint32_t> closed;         // left in good order
  std::atomic<std::uint32_t> aborted;                    // the notice below is valid
  std::uint32_t notice_bytes;
  std::byte notice[Notice::kMostBytes];
};
static_assert(sizeof(ShmControl) <= ShmLayout::kPage);

// One message, or a fragment of one. `filled` is written last by the sender and read first by the
// receiver (release, acquire); the slot is the sender's again when `emptied` has passed it.
struct alignas(64) ShmSlot {
  std::atomic<std::uint64_t> filled;  // number of this fill, from 1
  Fingerprint call;
  std::uint64_t message_bytes;
  std::uint32_t bytes;    // in this slot; 0 where the message lies in the sender's heap
  std::uint32_t segment;  // of the sender's heap; 0 where the bytes are in the slot
  std::uint64_t offset : 63;
  std::uint64_t exchange : 1;  // the receiver may write to it
};
static_assert(sizeof(ShmSlot) == 64);

struct ShmRing {
  alignas(64) std::atomic<std::uint64_t> emptied;  // written by the receiver
  ShmSlot slots[ShmLayout::kSlots];
};

// What travels on the socket. Fixed size, so that writes of different threads never mix.
struct ShmLink::Signal {
  enum Kind : std::uint32_t { wake = 1, heap_added = 2, heap_removed = 3 };
  std::uint32_t kind;
  std::uint32_t segment;
  std::uint64_t bytes;
};

namespace {

// A group's rings on one host stay around this size, whatever the number of ranks.
constexpr std::size_t kRingsBytes = 8u << 20;
constexpr std::size_t kLargestSlot = 64u << 10;
constexpr std::size_t kSmallestSlot = 4u << 10;

// Below this a copy is cheaper than waiting for the peer to have read the original.
constexpr std::size_t kSmallestReference = 4096;

std::size_t round_up(std::size_t value, std::size_t unit) {
  return (value + unit - 1) / unit * unit;
}

}  // namespace

ShmLayout::ShmLayout(int num_ranks) {
  const auto rings = static_cast<std::size_t>(std::max(num_ranks - 1, 1));
  slot_bytes =
      std::clamp(kRingsBytes / rings / kSlots / kPage * kPage, kSmallestSlot, kLargestSlot);
  ring_bytes = round_up(sizeof(ShmRing), kPage) + kSlots * slot_bytes;
  segment_bytes = kPage + static_cast<std::size_t>(num_ranks) * ring_bytes;
}

ShmSegment::ShmSegment(int num_ranks, Waiting waiting)
    : layout_(num_ranks), memory_(SharedMemory::create(layout_.segment_bytes)) {
  control().heavy_fences = waiting == Waiting::looking && take_part_in_heavy_fences() ? 1 : 0;
}

ShmControl& ShmSegment::control() const { return *reinterpret_cast<ShmControl*>(memory_.data()); }

// The flag is set, then a fence, then we look once more for work; a peer publishes work, then a
// fence, then looks at the flag: one of the two sees the other. The fence of the peer may be ours
// (heavy_fence).
void ShmSegment::ask_for_rings() {
  ShmControl& mine = control();
  if (mine.sleeping.load(std::memory_order_relaxed) != 0) return;
  mine.sleeping.store(1, std::memory_order_relaxed);
  if (mine.heavy_fences != 0) {
    heavy_fence();
  } else {
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
}

void ShmSegment::stop_rings() { control().sleeping.store(0, std::memory_order_relaxed); }

ShmLink::ShmLink(int self, int peer, net::Fd socket, std::shared_ptr<ShmSegment> segment,
                 std::shared_ptr<SharedHeap> heap, Deadline deadline)
    : Link(self, peer),
      segment_(std::move(segment)),
      heap_(std::move(heap)),
      socket_(std::move(socket)) {
  const ShmLayout& layout = segment_->layout();
  net::send_descriptors(socket_, {segment_->memory().descriptor()}, deadline);
  peer_memory_ = SharedMemory::map(
      std::move(net::receive_descriptors(socket_, 1, deadline).front()), layout.segment_bytes);
  peer_control_ = reinterpret_cast<ShmControl*>(peer_memory_.data());
  needs_fence_ = peer_control_->heavy_fences == 0 || segment_->control().heavy_fences == 0;
  std::byte* mine = segment_->memory().data() + layout.ring_offset(peer);
  std::byte* theirs = peer_memory_.data() + layout.ring_offset(self);
  outgoing_ = reinterpret_cast<ShmRing*>(mine);
  incoming_ = reinterpret_cast<ShmRing*>(theirs);
  outgoing_data_ = mine + layout.ring_bytes - ShmLayout::kSlots * layout.slot_bytes;
  incoming_data_ = theirs + layout.ring_bytes - ShmLayout::kSlots * layout.slot_bytes;
}

ShmLink::~ShmLink() = default;

bool ShmLink::progress() {
  const bool settled = settle();
  const bool sent = progress_sends();
  const bool received = progress_receives();
  return settled || sent || received;
}

// Takes note of the slots the peer has emptied, and the answers out of them. True where somebody
// may have waited for that.
bool ShmLink::settle() {
  if (freed_ == sent_) return false;
  const std::uint64_t emptied = outgoing_->emptied.load(std::memory_order_acquire);
  bool settled = freed_ < referenced_ && emptied >= referenced_;
  for (; !answers_.empty() && answers_.front().fill <= emptied; answers_.pop_front()) {
    const Answer& answer = answers_.front();
    std::memcpy(answer.destination.data(), outgoing_slot(answer.fill - 1),
                answer.destination.size());
    settled = true;
  }
  freed_ = emptied;
  return settled;
}

bool ShmLink::progress_sends() {
  bool moved = false;
  while (!sends_.empty()) {
    if (sent_ - freed_ >= ShmLayout::kSlots) {
      moved = settle() || moved;
      if (sent_ - freed_ >= ShmLayout::kSlots) break;
    }
    Send& send = sends_.front();
    const std::size_t index = sent_ % ShmLayout::kSlots;
    ShmSlot& slot = outgoing_->slots[index];
    slot.call = send.call;
    slot.message_bytes = send.bytes.size();
    slot.exchange = send.answer != nullptr;
    const std::size_t left = send.bytes.size() - send.done;
    if (const auto place = send.done == 0 ? place_of(send.bytes) : std::nullopt) {
      slot.bytes = 0;
      slot.segment = place->segment;
      slot.offset = place->offset;
      send.done = send.bytes.size();
      referenced_ = sent_ + 1;
    } else {
      const std::size_t size = std::min(left, segment_->layout().slot_bytes);
      if (size > 0) std::memcpy(outgoing_slot(sent_), send.bytes.data() + send.done, size);
      if (send.answer != nullptr && size > 0) answers_.push_back({sent_ + 1, {send.answer, size}});
      slot.bytes = static_cast<std::uint32_t>(size);
      slot.segment = 0;
      slot.offset = 0;
      send.done += size;
    }
    slot.filled.store(++sent_, std::memory_order_release);
    moved = true;
    if (send.done == send.bytes.size()) sends_.pop_front();
  }
  if (moved) ring_peer();
  return moved;
}

std::byte* ShmLink::outgoing_slot(std::uint64_t fill) const {
  return outgoing_data_ + (fill % ShmLayout::kSlots) * segment_->layout().slot_bytes;
}

const ShmSlot* ShmLink::arrived() const {
  const ShmSlot& slot = incoming_->slots[received_ % ShmLayout::kSlots];
  return slot.filled.load(std::memory_order_acquire) == received_ + 1 ? &slot : nullptr;
}

std::byte* ShmLink::payload(const ShmSlot& slot) {
  const std::size_t slot_bytes = segment_->layout().slot_bytes;
  if (slot.segment == 0) {
    if (slot.bytes > slot_bytes)
      throw CommError({.fault = Fault::corrupted,
                       .operation = name(slot.call.operation),
                       .ranks = {peer()},
                       .explanation = "A slot of shared memory claims more bytes than it has."});
    return incoming_data_ + (received_ % ShmLayout::kSlots) * slot_bytes;
  }
  // The announcement was on the socket before the message was in the ring.
  if (!peer_heap_.contains(slot.segment)) read_signals();
  const auto found = peer_heap_.find(slot.segment);
  if (found != peer_heap_.end() && !found->second)
    throw CommError({.fault = Fault::corrupted,
                     .operation = name(slot.call.operation),
                     .ranks = {peer()},
                     .explanation = "Its shared memory could not be taken over: this process has "
                                    "as many files open as it may (ulimit -n)."});
  if (found == peer_heap_.end() || slot.offset > found->second.size() ||
      slot.message_bytes > found->second.size() - slot.offset)
    throw CommError({.fault = Fault::corrupted,
                     .operation = name(slot.call.operation),
                     .ranks = {peer()},
                     .explanation = "A message refers to shared memory that was never announced."});
  return found->second.data() + slot.offset;
}

void ShmLink::consume() {
  incoming_->emptied.store(++received_, std::memory_order_release);
  ring_peer();
}

bool ShmLink::progress_receives() {
  bool moved = false;
  while (!receives_.empty()) {
    const ShmSlot* slot = arrived();
    if (slot == nullptr) break;
    Receive& receive = receives_.front();
    check_message(receive.call, receive.bytes.size(), slot->call, slot->message_bytes);
    const std::byte* from = payload(*slot);
    const std::size_t size = slot->segment != 0 ? receive.bytes.size() : slot->bytes;
    if (size > receive.bytes.size() - receive.done)
      throw CommError({.fault = Fault::corrupted,
                       .operation = name(slot->call.operation),
                       .ranks = {peer()},
                       .explanation = "A message has more fragments than bytes."});
    if (size > 0) std::memcpy(receive.bytes.data() + receive.done, from, size);
    receive.done += size;
    const bool whole = receive.done == receive.bytes.size();
    consume();
    moved = true;
    if (whole) receives_.pop_front();
  }
  return moved;
}

std::optional<SharedHeap::Place> ShmLink::place_of(std::span<const std::byte> bytes) const {
  if (bytes.size() < kSmallestReference) return std::nullopt;
  const auto place = heap_->find(bytes.data(), bytes.size());
  // A peer that has yet to hear of the segment gets a copy.
  if (place && place->segment > announced_.load(std::memory_order_acquire)) return std::nullopt;
  return place;
}

bool ShmLink::sends_done() const {
  return sends_.empty() && answers_.empty() &&
         (freed_ >= referenced_ ||
          outgoing_->emptied.load(std::memory_order_acquire) >= referenced_);
}

std::optional<View> ShmLink::try_view(const Fingerprint& call, std::size_t bytes) {
  if (!receives_.empty()) return std::nullopt;
  const ShmSlot* slot = arrived();
  if (slot == nullptr) return std::nullopt;
  check_message(call, bytes, slot->call, slot->message_bytes);
  std::byte* data = payload(*slot);
  return View{data, slot->exchange != 0 ? data : nullptr};
}

void ShmLink::release_view() { consume(); }

void ShmLink::ring_peer() {
  if (needs_fence_) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
  } else {
    std::atomic_signal_fence(std::memory_order_seq_cst);  // the compiler keeps the order as well
  }
  if (peer_control_->sleeping.load(std::memory_order_relaxed) != 0 &&
      peer_control_->sleeping.exchange(0, std::memory_order_relaxed) != 0)
    signal({Signal::wake, 0, 0}, -1);
}

bool ShmLink::arm() {
  segment_->ask_for_rings();
  const bool settled = settle();
  const bool can_receive = receiving() && arrived() != nullptr;
  const bool can_send = !sends_.empty() && sent_ - freed_ < ShmLayout::kSlots;
  return !settled && !can_receive && !can_send;
}

void ShmLink::abandon_call() {
  Link::abandon_call();
  answers_.clear();
}

void ShmLink::disarm() { segment_->stop_rings(); }

// Buffers the peer has given back stay mapped until no call can be looking at them any more.
void ShmLink::begin_call() {
  if (announcements_wait_.load(std::memory_order_acquire)) announce_waiting();
  const auto now = peer_control_->announcements.load(std::memory_order_acquire);
  if (now == announcements_seen_) return;
  announcements_seen_ = now;
  read_signals();
  for (const std::uint32_t segment : removed_) peer_heap_.erase(segment);
  removed_.clear();
}

short ShmLink::wanted_events() const { return hung_up_ ? 0 : POLLIN; }

void ShmLink::woken(short events) {
  if (events != 0) read_signals();
}

// False where the socket is full, of wake-ups or of announcements: one more wake-up would tell the
// peer nothing.
bool ShmLink::signal(const Signal& signal, int descriptor) {
  Signal copy = signal;
  iovec payload{&copy, sizeof(copy)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &payload;
  message.msg_iovlen = 1;
  if (descriptor >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
  }
  while (::sendmsg(socket_.get(), &message, MSG_NOSIGNAL) < 0) {
    if (errno == EINTR) continue;
    // Any other error means the peer is gone, which reading will find out.
    return errno == EPIPE || errno == ECONNRESET;
  }
  return true;
}

void ShmLink::announce(std::uint32_t segment, const std::shared_ptr<SharedMemory>& memory) {
  {
    const std::lock_guard lock(announcing_);
    to_announce_.push_back({segment, memory});
  }
  announce_waiting();
}

// As many as the socket takes; a peer that computes for long reads none.
void ShmLink::announce_waiting() {
  const std::lock_guard lock(announcing_);
  for (; !to_announce_.empty(); to_announce_.pop_front()) {
    const auto& [segment, memory] = to_announce_.front();
    const Signal news = memory ? Signal{Signal::heap_added, segment, memory->size()}
                               : Signal{Signal::heap_removed, segment, 0};
    if (!signal(news, memory ? memory->descriptor() : -1)) break;
    if (memory) announced_.store(segment, std::memory_order_release);
    segment_->control().announcements.fetch_add(1, std::memory_order_release);
  }
  announcements_wait_.store(!to_announce_.empty(), std::memory_order_release);
}

void ShmLink::read_signals() {
  while (!hung_up_) {
    Signal signal{};
    iovec payload{&signal, sizeof(signal)};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
    msghdr message{};
    message.msg_iov = &payload;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    const ssize_t got = ::recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return;
    net::Fd descriptor;
    if (got > 0 && message.msg_controllen > 0) {
      const cmsghdr* header = CMSG_FIRSTHDR(&message);
      if (header != nullptr && header->cmsg_type == SCM_RIGHTS) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(header), sizeof(int));
        descriptor = net::Fd(fd);
      }
    }
    if (got != sizeof(signal)) {
      hung_up_ = true;
      return;
    }
    if (signal.kind == Signal::heap_added)
      peer_heap_.insert_or_assign(
          signal.segment,
          descriptor ? SharedMemory::map(std::move(descriptor), signal.bytes) : SharedMemory());
    if (signal.kind == Signal::heap_removed) removed_.push_back(signal.segment);
  }
}

PeerState ShmLink::state() const {
  if (peer_control_->aborted.load(std::memory_order_acquire) != 0) return PeerState::aborted;
  if (peer_control_->closed.load(std::memory_order_acquire) != 0) return PeerState::closed;
  return hung_up_ ? PeerState::dead : PeerState::alive;
}

Notice ShmLink::notice() const {
  const std::size_t size = std::min<std::size_t>(peer_control_->notice_bytes, Notice::kMostBytes);
  return Notice::decode(std::span(peer_control_->notice, size));
}

void ShmLink::send_notice(const Notice& notice) {
  ShmControl& control = segment_->control();
  if (control.aborted.load(std::memory_order_relaxed) == 0) {
    const auto bytes = notice.encode();
    std::memcpy(control.notice, bytes.data(), bytes.size());
    control.notice_bytes = static_cast<std::uint32_t>(bytes.size());
    control.aborted.store(1, std::memory_order_release);
  }
  signal({Signal::wake, 0, 0}, -1);
}

void ShmLink::send_goodbye(Deadline) {
  segment_->control().closed.store(1, std::memory_order_release);
  signal({Signal::wake, 0, 0}, -1);
}

}  // namespace lockstep::comm
