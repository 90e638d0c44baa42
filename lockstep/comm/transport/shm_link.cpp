#include <lockstep/comm/transport/shm_link.h>

#include <linux/membarrier.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <lockstep/base/error.h>
#include <lockstep/net/socket.h>

namespace lockstep::comm {

namespace {

bool membarrier(int command) { return ::syscall(SYS_membarrier, command, 0, 0) == 0; }

// Half of a pair of memory fences, for a flag that is set rarely and read often, across processes:
// the writer pays for a full fence in every thread that reads, and the readers pay nothing.
//
// Makes heavy_fence() reach this process. False if the kernel cannot do that: then both sides need
// a full fence of their own.
bool take_part_in_heavy_fences() { return membarrier(MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED); }

// Makes every running thread of this process, and of every process that takes part, pass a full
// fence. Costs some microseconds.
void heavy_fence() {
  const bool done = membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED);
  if (!done)
    throw UsageError("the system call membarrier worked when this process joined its group, and is "
                     "refused now ({}): allow it in the filter (seccomp) that was set since",
                     std::strerror(errno));
}

// The rings of a group on one host stay around this size, whatever the number of ranks.
constexpr std::size_t kRingsBytes = 8u << 20;
constexpr std::size_t kLargestSlot = 64u << 10;
constexpr std::size_t kSmallestSlot = 4u << 10;

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

ShmSegment::ShmSegment(int num_ranks, FencePayer payer)
    : layout_(num_ranks), memory_(SharedMemory::create(layout_.segment_bytes)) {
  control().heavy_fences = payer == FencePayer::sleeper && take_part_in_heavy_fences() ? 1 : 0;
}

ShmControl& ShmSegment::control() const { return *reinterpret_cast<ShmControl*>(memory_.data()); }

// This rank sets its flag, passes a fence and looks once more for work. A peer publishes work,
// passes a fence and looks at the flag. So one of the two sees the other. This rank may run the
// peer's fence for it (heavy_fence).
void ShmSegment::ask_for_rings() {
  ShmControl& mine = control();
  if (mine.sleeping.load(std::memory_order_relaxed) != 0) return;
  if (++num_sleeps_ == 0) ++num_sleeps_;
  mine.sleeping.store(num_sleeps_, std::memory_order_relaxed);
  if (mine.heavy_fences != 0) {
    heavy_fence();
  } else {
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
}

void ShmSegment::stop_rings() { control().sleeping.store(0, std::memory_order_relaxed); }

// A message on the socket. Its size is fixed, so that writes of different threads never mix.
struct ShmChannel::Signal {
  enum Kind : std::uint32_t { wake = 1, heap_added = 2, heap_removed = 3 };
  std::uint32_t kind;
  std::uint32_t segment;
  std::uint64_t bytes;
};

ShmChannel::ShmChannel(net::Fd socket, ShmControl& mine, const ShmControl& theirs)
    : socket_(std::move(socket)), mine_(mine), theirs_(theirs) {}

void ShmChannel::wake_peer() { send({Signal::wake, 0, 0}, -1); }

void ShmChannel::begin_call() {
  if (announcements_wait_.load(std::memory_order_acquire)) announce_waiting();
  const auto now = theirs_.announcements.load(std::memory_order_acquire);
  if (now == announcements_seen_) return;
  announcements_seen_ = now;
  read();
  for (const std::uint32_t segment : removed_) peer_heap_.erase(segment);
  removed_.clear();
}

const SharedMemory* ShmChannel::peer_segment(std::uint32_t segment) {
  // The announcement was on the socket before any message that refers to the segment was in the
  // ring.
  if (!peer_heap_.contains(segment)) read();
  const auto found = peer_heap_.find(segment);
  return found == peer_heap_.end() ? nullptr : &found->second;
}

// False if the socket is full, of wake-ups or of announcements: the peer will wake anyway.
bool ShmChannel::send(const Signal& signal, int descriptor) {
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
    // Any other error means that the peer is gone, which reading will find out.
    return errno == EPIPE || errno == ECONNRESET;
  }
  return true;
}

void ShmChannel::announce(std::uint32_t segment, const std::shared_ptr<SharedMemory>& memory) {
  {
    const std::lock_guard lock(announcing_);
    const auto unheard =
        std::find_if(to_announce_.begin(), to_announce_.end(),
                     [&](const Announcement& one) { return one.segment == segment; });
    if (unheard != to_announce_.end()) {
      to_announce_.erase(unheard);  // gone before the peer has heard of it
      return;
    }
    to_announce_.push_back({segment, memory});
  }
  announce_waiting();
}

// Sends as many as the socket takes; a peer that computes for long reads none.
void ShmChannel::announce_waiting() {
  const std::lock_guard lock(announcing_);
  for (; !to_announce_.empty(); to_announce_.pop_front()) {
    const auto& [segment, memory] = to_announce_.front();
    const Signal news = memory ? Signal{Signal::heap_added, segment, memory->size()}
                               : Signal{Signal::heap_removed, segment, 0};
    if (!send(news, memory ? memory->descriptor() : -1)) break;
    if (memory) announced_.store(segment, std::memory_order_release);
    mine_.announcements.fetch_add(1, std::memory_order_release);
  }
  announcements_wait_.store(!to_announce_.empty(), std::memory_order_release);
}

void ShmChannel::read() {
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

namespace {

// For smaller messages a copy is cheaper than waiting until the peer has read the original.
constexpr std::size_t kSmallestReference = 4096;

SharedMemory swap_segments(const net::Fd& socket, const ShmSegment& mine, Deadline deadline) {
  net::send_descriptors(socket, {mine.memory().descriptor()}, deadline);
  return SharedMemory::map(std::move(net::receive_descriptors(socket, 1, deadline).front()),
                           mine.layout().segment_bytes);
}

}  // namespace

ShmLink::ShmLink(int self, int peer, net::Fd socket, std::shared_ptr<ShmSegment> segment,
                 std::shared_ptr<SharedHeap> heap, Deadline deadline)
    : Link(self, peer),
      segment_(std::move(segment)),
      heap_(std::move(heap)),
      peer_memory_(swap_segments(socket, *segment_, deadline)),
      peer_control_(*reinterpret_cast<ShmControl*>(peer_memory_.data())),
      channel_(std::move(socket), segment_->control(), peer_control_),
      needs_fence_(peer_control_.heavy_fences == 0 || segment_->control().heavy_fences == 0) {
  const ShmLayout& layout = segment_->layout();
  std::byte* mine = segment_->memory().data() + layout.ring_offset(peer);
  std::byte* theirs = peer_memory_.data() + layout.ring_offset(self);
  outgoing_ = reinterpret_cast<ShmRing*>(mine);
  incoming_ = reinterpret_cast<ShmRing*>(theirs);
  outgoing_data_ = mine + layout.ring_bytes - ShmLayout::kSlots * layout.slot_bytes;
  incoming_data_ = theirs + layout.ring_bytes - ShmLayout::kSlots * layout.slot_bytes;
}

bool ShmLink::progress() {
  const bool settled = settle();
  const bool sent = progress_sends();
  const bool received = progress_receives();
  return settled || sent || received;
}

// Notes the slots that the peer has emptied, and takes the answers out of them. True if a thread
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
  const SharedMemory* memory = channel_.peer_segment(slot.segment);
  if (memory != nullptr && !*memory)
    throw CommError({.fault = Fault::corrupted,
                     .operation = name(slot.call.operation),
                     .ranks = {peer()},
                     .explanation = "Its shared memory could not be taken over: this process has "
                                    "as many files open as it may (ulimit -n)."});
  if (memory == nullptr || slot.offset > memory->size() ||
      slot.message_bytes > memory->size() - slot.offset)
    throw CommError({.fault = Fault::corrupted,
                     .operation = name(slot.call.operation),
                     .ranks = {peer()},
                     .explanation = "A message refers to shared memory that was never announced."});
  return memory->data() + slot.offset;
}

// A message in the sender's own memory is void once the sender has failed, because the memory
// belongs to the sender's user again. The sender announces its failure before it gives the memory
// back.
void ShmLink::check_still_there(const ShmSlot& slot) const {
  if (slot.segment == 0) return;
  std::atomic_thread_fence(std::memory_order_acquire);
  if (state() == PeerState::aborted) throw notice().error({}, self());
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
    check_still_there(*slot);
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
  if (place && !channel_.announced(place->segment)) return std::nullopt;
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

void ShmLink::release_view() {
  const ShmSlot& slot = incoming_->slots[received_ % ShmLayout::kSlots];
  check_still_there(slot);
  if (slot.exchange != 0) count_sent(slot.message_bytes);
  consume();
}

void ShmLink::ring_peer() {
  if (needs_fence_) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
  } else {
    std::atomic_signal_fence(std::memory_order_seq_cst);  // the compiler keeps the order as well
  }
  // A rank that is stopped between the next two steps has rung already; nobody relies on a ring
  // that was never sent.
  std::uint32_t sleep = peer_control_.sleeping.load(std::memory_order_relaxed);
  if (sleep == 0) return;
  channel_.wake_peer();
  peer_control_.sleeping.compare_exchange_strong(sleep, 0, std::memory_order_relaxed);
}

bool ShmLink::arm() {
  segment_->ask_for_rings();
  const bool settled = settle();
  const bool can_receive = receiving() && arrived() != nullptr;
  const bool can_send = !sends_.empty() && sent_ - freed_ < ShmLayout::kSlots;
  return !settled && !can_receive && !can_send;
}

void ShmLink::abandon_call() noexcept {
  Link::abandon_call();
  answers_.clear();
}

void ShmLink::disarm() { segment_->stop_rings(); }

void ShmLink::begin_call() { channel_.begin_call(); }

short ShmLink::wanted_events() const { return channel_.hung_up() ? 0 : POLLIN; }

void ShmLink::woken(short events) {
  if (events != 0) channel_.read();
}

PeerState ShmLink::state() const {
  if (peer_control_.aborted.load(std::memory_order_acquire) != 0) return PeerState::aborted;
  if (peer_control_.closed.load(std::memory_order_acquire) != 0) return PeerState::closed;
  return channel_.hung_up() ? PeerState::dead : PeerState::alive;
}

Notice ShmLink::notice() const {
  const std::size_t size = std::min<std::size_t>(peer_control_.notice_bytes, Notice::kMostBytes);
  return Notice::decode(std::span(peer_control_.notice, size));
}

void ShmLink::send_notice(const Notice& notice) {
  ShmControl& control = segment_->control();
  if (control.aborted.load(std::memory_order_relaxed) == 0) {
    const auto bytes = notice.encode();
    std::memcpy(control.notice, bytes.data(), bytes.size());
    control.notice_bytes = static_cast<std::uint32_t>(bytes.size());
    control.aborted.store(1, std::memory_order_release);
  }
  channel_.wake_peer();
}

void ShmLink::send_goodbye(Deadline) {
  segment_->control().closed.store(1, std::memory_order_release);
  channel_.wake_peer();
}

}  // namespace lockstep::comm
