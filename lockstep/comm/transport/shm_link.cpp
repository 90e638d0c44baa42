#include <lockstep/comm/transport/shm_link.h>

#include <poll.h>

#include <algorithm>
#include <cstring>

#include <lockstep/net/socket.h>

namespace lockstep::comm {

namespace {

// Below this a copy is cheaper than waiting for the peer to have read the original.
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

// What lies in the sender's own memory is no message any more once the sender has failed: the
// memory is its user's again. It says so before it gives the memory back.
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
  // Whoever is stopped in between has rung: nobody relies on a ring that never came.
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
