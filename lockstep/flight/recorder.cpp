#include <lockstep/flight/recorder.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <string_view>

#include <lockstep/base/deadline.h>
#include <lockstep/base/error.h>
#include <lockstep/base/thread_number.h>

namespace lockstep::flight {

namespace {

// started and ended: 16 bits of the lap, one bit "failed" (of ended only), 47 bits of nanoseconds
// since the call was queued, plus one so that 0 means "not reached". 39 hours fit; longer
// saturates.
constexpr unsigned kTimeBits = 47;
constexpr std::uint64_t kTimeMask = (std::uint64_t{1} << kTimeBits) - 1;
constexpr std::uint64_t kFailedBit = std::uint64_t{1} << kTimeBits;
constexpr unsigned kLapShift = 48;

// A peer's rank plus one, so that 0 means none.
constexpr unsigned kPeerBits = 16;
constexpr std::uint64_t kPeerMask = (std::uint64_t{1} << kPeerBits) - 1;

constexpr std::size_t kLargestCapacity = std::size_t{1} << 20;

std::uint64_t stamp(std::uint64_t lap) { return lap << kLapShift; }

bool of_lap(std::uint64_t word, std::uint64_t lap) {
  return word >> kLapShift == stamp(lap) >> kLapShift;
}

std::uint64_t elapsed(std::int64_t queued_ns) {
  const auto span = static_cast<std::uint64_t>(std::max<std::int64_t>(now_ns() - queued_ns, 0));
  return std::min(span + 1, kTimeMask);
}

// Only from "not reached": the first mark of each state counts.
void set_once(std::atomic<std::uint64_t>& word, std::uint64_t lap, std::uint64_t value) {
  std::uint64_t empty = stamp(lap);
  word.compare_exchange_strong(empty, stamp(lap) | value, std::memory_order_acq_rel,
                               std::memory_order_relaxed);
}

std::string file_and_line(const char* file, std::uint32_t line) {
  std::string_view path = file;
  if (path.empty()) return "";
  if (const auto slash = path.rfind('/'); slash != path.npos) path.remove_prefix(slash + 1);
  return fmt::format("{}:{}", path, line);
}

std::string plain_summary(const Record& record) {
  if (record.sequence == 0) return record.operation;
  return fmt::format("{} #{}", record.operation, record.sequence);
}

}  // namespace

const char* name(State state) {
  switch (state) {
    case State::queued: return "queued";
    case State::started: return "started";
    case State::finished: return "finished";
    case State::failed: return "failed";
  }
  return "unknown";
}

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
      .count();
}

void add_peer(Record& record, int rank, std::uint64_t receives) {
  if (rank < 0 || static_cast<std::uint64_t>(rank) >= kPeerMask) return;
  const auto word = static_cast<std::uint64_t>(rank) + 1;
  for (unsigned place = 0; place < 4; ++place) {
    const unsigned shift = place * kPeerBits;
    const std::uint64_t there = record.peers >> shift & kPeerMask;
    if (there != 0 && there != word) continue;
    if (there == 0) record.peers |= word << shift;
    record.receives[place] = std::max(record.receives[place], receives);
    return;
  }
}

Recorder::Recorder(std::string group, int rank, std::vector<int> global_ranks, Summarize summarize,
                   std::size_t capacity, std::uint32_t generation)
    : group_(std::move(group)),
      rank_(rank),
      global_ranks_(std::move(global_ranks)),
      summarize_(summarize == nullptr ? plain_summary : summarize),
      generation_(generation),
      mask_(std::bit_ceil(std::clamp<std::size_t>(capacity, 1, kLargestCapacity)) - 1),
      shift_(static_cast<unsigned>(std::countr_one(mask_))),
      slots_(new Slot[mask_ + 1]),
      caller_(this_thread_number()),
      sent_(new std::atomic<std::uint64_t>[global_ranks_.size()] {}) {
  if (rank_ < 0 || static_cast<std::size_t>(rank_) >= global_ranks_.size())
    throw UsageError("flight recorder of group '{}': rank {} is none of its {} ranks", group_,
                     rank_, global_ranks_.size());
}

std::uint64_t Recorder::record(const Record& record) {
  caller_.store(this_thread_number(), std::memory_order_relaxed);
  std::uint64_t last = last_sequence_.load(std::memory_order_relaxed);
  while (last < record.sequence &&
         !last_sequence_.compare_exchange_weak(last, record.sequence, std::memory_order_relaxed)) {
  }

  const std::uint64_t number = next_.fetch_add(1, std::memory_order_relaxed);
  Slot& slot = slot_of(number);

  // Another writer is in this slot only where it was asleep for a whole lap of the ring: then one
  // of the two entries is lost, rather than both garbled.
  std::uint64_t version = slot.version.load(std::memory_order_relaxed);
  if ((version & 1) != 0 || version > 2 * number) return number;
  if (!slot.version.compare_exchange_strong(version, 2 * number + 1, std::memory_order_acq_rel,
                                            std::memory_order_relaxed))
    return number;

  // Release, so that a reader that sees any of these also sees that the slot is being written.
  constexpr auto order = std::memory_order_release;
  const std::uint64_t empty = stamp(lap_of(number));
  slot.started.store(empty, order);
  slot.ended.store(empty, order);
  slot.queued_ns.store(now_ns(), order);
  slot.sequence.store(record.sequence, order);
  slot.operation.store(record.operation, order);
  for (std::size_t i = 0; i < 4; ++i) slot.detail[i].store(record.detail[i], order);
  slot.file.store(record.file, order);
  slot.line.store(record.line, order);
  slot.peers.store(record.peers, order);
  for (std::size_t i = 0; i < 4; ++i) slot.receives[i].store(record.receives[i], order);
  slot.needs.store(record.needs, order);
  slot.version.store(2 * number, order);
  return number;
}

void Recorder::mark(std::uint64_t number, State state) {
  if (number == 0 || state == State::queued) return;
  Slot& slot = slot_of(number);
  if (slot.version.load(std::memory_order_acquire) != 2 * number) return;
  // Where the slot is overwritten from here on, queued_ns may be the new entry's; the word is then
  // of a later lap, and the exchange fails.
  const std::uint64_t time = elapsed(slot.queued_ns.load(std::memory_order_relaxed));
  if (state == State::started)
    set_once(slot.started, lap_of(number), time);
  else
    set_once(slot.ended, lap_of(number), time | (state == State::failed ? kFailedBit : 0));
}

bool Recorder::read(const Slot& slot, Entry& entry) const {
  constexpr auto order = std::memory_order_acquire;
  const std::uint64_t version = slot.version.load(order);
  if (version == 0 || (version & 1) != 0) return false;
  const std::uint64_t started = slot.started.load(order);
  const std::uint64_t ended = slot.ended.load(order);
  const std::int64_t queued_ns = slot.queued_ns.load(order);
  Record record;
  record.sequence = slot.sequence.load(order);
  record.operation = slot.operation.load(order);
  for (std::size_t i = 0; i < 4; ++i) record.detail[i] = slot.detail[i].load(order);
  record.file = slot.file.load(order);
  record.line = slot.line.load(order);
  record.peers = slot.peers.load(order);
  for (std::size_t i = 0; i < 4; ++i) record.receives[i] = slot.receives[i].load(order);
  record.needs = slot.needs.load(order);
  if (slot.version.load(std::memory_order_relaxed) != version) return false;

  entry.number = version / 2;
  const std::uint64_t lap = lap_of(entry.number);
  LOCKSTEP_CHECK(of_lap(started, lap) && of_lap(ended, lap));
  entry.sequence = record.sequence;
  entry.operation = record.operation;
  entry.summary = summarize_(record);
  entry.call_site = file_and_line(record.file, record.line);
  for (std::uint64_t rest = record.peers; rest != 0; rest >>= kPeerBits) {
    entry.receives.push_back(record.receives[entry.peers.size()]);
    entry.peers.push_back(static_cast<int>(rest & kPeerMask) - 1);
  }
  entry.needs = record.needs;
  entry.queued_ns = queued_ns;
  const auto time_of = [&](std::uint64_t word) -> std::int64_t {
    const std::uint64_t time = word & kTimeMask;
    return time == 0 ? 0 : queued_ns + static_cast<std::int64_t>(time) - 1;
  };
  entry.started_ns = time_of(started);
  entry.finished_ns = time_of(ended);
  entry.state = entry.finished_ns != 0
                    ? ((ended & kFailedBit) != 0 ? State::failed : State::finished)
                    : (entry.started_ns != 0 ? State::started : State::queued);
  return true;
}

std::vector<Entry> Recorder::entries() const {
  std::vector<Entry> result;
  result.reserve(capacity());
  for (std::size_t i = 0; i <= mask_; ++i) {
    Entry entry;
    if (read(slots_[i], entry)) result.push_back(std::move(entry));
  }
  std::sort(result.begin(), result.end(),
            [](const Entry& a, const Entry& b) { return a.number < b.number; });
  return result;
}

std::optional<Entry> Recorder::entry(std::uint64_t number) const {
  Entry entry;
  if (number == 0 || !read(slot_of(number), entry) || entry.number != number) return std::nullopt;
  return entry;
}

Recorder::Block::Block(Recorder& recorder, std::uint64_t entry) {
  for (Waiter& waiter : recorder.waiters_) {
    std::uint64_t nobody = 0;
    if (!waiter.thread.compare_exchange_strong(nobody, kBeingWritten, std::memory_order_acquire,
                                               std::memory_order_relaxed))
      continue;
    waiter.entry.store(entry, std::memory_order_relaxed);
    waiter.since_ns.store(now_ns(), std::memory_order_relaxed);
    waiter.thread.store(this_thread_number(), std::memory_order_release);
    thread_ = &waiter.thread;
    return;
  }
}

Recorder::Block::~Block() {
  if (thread_ != nullptr) thread_->store(0, std::memory_order_release);
}

std::vector<BlockedThread> Recorder::blocked() const {
  std::vector<BlockedThread> result;
  for (const Waiter& waiter : waiters_) {
    const std::uint64_t thread = waiter.thread.load(std::memory_order_acquire);
    if (thread == 0 || thread == kBeingWritten) continue;
    const BlockedThread one{.thread = thread,
                            .entry = waiter.entry.load(std::memory_order_acquire),
                            .since_ns = waiter.since_ns.load(std::memory_order_acquire)};
    // Another wait may have taken its place meanwhile; one of the same thread has a later time.
    if (waiter.thread.load(std::memory_order_relaxed) == thread) result.push_back(one);
  }
  return result;
}

void Recorder::note_sent(int rank, std::uint64_t number) {
  sent_[static_cast<std::size_t>(rank)].store(number, std::memory_order_relaxed);
}

void Recorder::note_refusal(std::string reason) {
  const std::lock_guard lock(refusal_mutex_);
  refusal_ = std::move(reason);
  refused_at_ = next_.load(std::memory_order_relaxed);
  num_refusals_.fetch_add(1, std::memory_order_relaxed);
}

std::string Recorder::refusal() const {
  const std::lock_guard lock(refusal_mutex_);
  return refused_at_ == next_.load(std::memory_order_relaxed) ? refusal_ : "";
}

std::uint64_t Recorder::sent_to(int rank) const {
  if (rank < 0 || static_cast<std::size_t>(rank) >= global_ranks_.size()) return 0;
  return sent_[static_cast<std::size_t>(rank)].load(std::memory_order_relaxed);
}

}  // namespace lockstep::flight
