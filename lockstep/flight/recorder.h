// The flight recorder: the last calls of one communicator, kept at all times, written out when
// something goes wrong.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::flight {

enum class State : std::uint8_t { queued, started, finished, failed };

const char* name(State state);

// Nanoseconds of the monotonic clock of this host: the clock of every time below.
std::int64_t now_ns();

// One call. Times are nanoseconds of the monotonic clock, 0 where not reached.
struct Entry {
  std::uint64_t number = 0;    // of the entry in this recorder, from 1
  std::uint64_t sequence = 0;  // of the call in its group; 0 for calls that are not numbered
  std::string operation;       // "all_reduce"
  std::string summary;         // "all_reduce #7 (sum of 1024 float32)"
  std::string call_site;       // "train.cpp:42"
  std::vector<int> peers;      // of a call that is not numbered: whom it is with, four at most
  std::vector<std::uint64_t> receives;  // by peer: the last message it takes from it; 0: none
  std::int32_t needs = 0;               // of a numbered call: Record::needs; not in dumps
  State state = State::queued;
  std::int64_t queued_ns = 0;
  std::int64_t started_ns = 0;
  std::int64_t finished_ns = 0;  // or failed
};

// A call, as the recorder is told of it: plain data, no allocation. `summarize` makes the text only
// when somebody asks for a dump.
struct Record {
  std::uint64_t sequence = 0;
  const char* operation = "";              // static lifetime
  std::uint64_t detail[4] = {0, 0, 0, 0};  // for summarize
  const char* file = "";                   // static lifetime (CallSite)
  std::uint32_t line = 0;
  std::uint64_t peers = 0;  // of a call that is not numbered: add_peer() for each
  std::uint64_t receives[4] = {0, 0, 0, 0};
  // The rank that has to make a numbered call too before it can end on this one.
  static constexpr std::int32_t kEveryone = -1;
  static constexpr std::int32_t kNobody = -2;
  std::int32_t needs = kNobody;
};

// Notes that a call is with this rank of the group, and takes its messages up to number `receives`
// (0: it takes none). Four ranks are kept, each once; ranks too high for their 16 bits are not.
void add_peer(Record& record, int rank, std::uint64_t receives = 0);

// A thread that can do nothing else until a call is over.
struct BlockedThread {
  std::uint64_t thread = 0;  // this_thread_number()
  std::uint64_t entry = 0;   // number of the call's entry
  std::int64_t since_ns = 0;

  bool operator==(const BlockedThread&) const = default;
};

// A ring of entries. Lock-free and allocation-free to write: any threads may call record() and
// mark() at any time. Readers get a consistent copy of each entry or skip it. An entry that the
// ring has overwritten is gone: marking it changes nothing. Nothing here fails but the constructor.
class Recorder {
 public:
  // Called by entries() only; null makes "operation #sequence".
  using Summarize = std::string (*)(const Record&);

  // `capacity` is rounded up to a power of two. UsageError where `rank` is none of `global_ranks`.
  Recorder(std::string group, int rank, std::vector<int> global_ranks, Summarize summarize,
           std::size_t capacity = 256, std::uint32_t generation = 0);
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  const std::string& group() const { return group_; }
  int rank() const { return rank_; }
  int global_rank() const { return global_ranks_[static_cast<std::size_t>(rank_)]; }
  const std::vector<int>& global_ranks() const { return global_ranks_; }
  std::uint32_t generation() const { return generation_; }
  std::size_t capacity() const { return mask_ + 1; }

  // Notes a new call as queued; returns its number.
  std::uint64_t record(const Record& record);

  // Notes that a call has changed state. The first time of each state counts; a call that is over
  // stays as it is.
  void mark(std::uint64_t number, State state);

  // Oldest first.
  std::vector<Entry> entries() const;
  // One of them; nothing where the ring has overwritten it.
  std::optional<Entry> entry(std::uint64_t number) const;

  // The thread that made the newest call, or that made the group where there was no call yet.
  std::uint64_t caller() const { return caller_.load(std::memory_order_relaxed); }

  // Says, while it lives, that the calling thread can do nothing else until a call is over. More
  // threads than there is room for are not noted.
  class Block {
   public:
    Block(Recorder& recorder, std::uint64_t entry);
    ~Block();
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;

   private:
    std::atomic<std::uint64_t>* thread_ = nullptr;
  };
  std::vector<BlockedThread> blocked() const;

  // How many messages this rank has given, or begun to give, to another rank of the group in calls
  // that are not numbered.
  void note_sent(int rank, std::uint64_t number);
  std::uint64_t sent_to(int rank) const;

  // Says that this rank refuses to go on to its next call, and why: what its caller is told, too.
  // Holds until the next record().
  void note_refusal(std::string reason);
  // Empty where none holds.
  std::string refusal() const;
  // How many there have been. Ranks that refuse the same have the same number.
  std::uint64_t num_refusals() const { return num_refusals_.load(std::memory_order_relaxed); }

  // The highest call number seen, also where point-to-point calls have pushed it out of the ring.
  std::uint64_t last_sequence() const { return last_sequence_.load(std::memory_order_relaxed); }

 private:
  // A sequence lock whose version also says which entry is in it: 2 × number, odd while it is
  // being written. Every field is an atomic of its own, so a torn read is detected, not undefined.
  //
  // started and ended hold which lap of the ring they belong to beside the time, so that a late
  // mark() of an entry that is being overwritten cannot touch the new one.
  struct alignas(64) Slot {
    std::atomic<std::uint64_t> version{0};
    std::atomic<std::uint64_t> started{0};
    std::atomic<std::uint64_t> ended{0};
    std::atomic<std::int64_t> queued_ns{0};
    std::atomic<std::uint64_t> sequence{0};
    std::atomic<const char*> operation{""};
    std::atomic<std::uint64_t> detail[4]{};
    std::atomic<const char*> file{""};
    std::atomic<std::uint32_t> line{0};
    std::atomic<std::uint64_t> peers{0};
    std::atomic<std::uint64_t> receives[4]{};
    std::atomic<std::int32_t> needs{0};
  };

  // A thread that waits, 0 where none does. The rest is written before and read after it.
  struct Waiter {
    std::atomic<std::uint64_t> thread{0};
    std::atomic<std::uint64_t> entry{0};
    std::atomic<std::int64_t> since_ns{0};
  };
  static constexpr std::uint64_t kBeingWritten = ~std::uint64_t{0};

  Slot& slot_of(std::uint64_t number) const { return slots_[(number - 1) & mask_]; }
  std::uint64_t lap_of(std::uint64_t number) const { return (number - 1) >> shift_; }
  bool read(const Slot& slot, Entry& entry) const;

  std::string group_;
  int rank_;
  std::vector<int> global_ranks_;
  Summarize summarize_;
  std::uint32_t generation_;
  std::size_t mask_;
  unsigned shift_;
  std::unique_ptr<Slot[]> slots_;
  std::atomic<std::uint64_t> next_{1};
  std::atomic<std::uint64_t> last_sequence_{0};
  std::atomic<std::uint64_t> caller_;
  std::array<Waiter, 8> waiters_;
  std::unique_ptr<std::atomic<std::uint64_t>[]> sent_;
  std::atomic<std::uint64_t> num_refusals_{0};
  mutable std::mutex refusal_mutex_;  // guards the two below
  std::string refusal_;
  std::uint64_t refused_at_ = 0;  // next_ when the refusal came
};

}  // namespace lockstep::flight
