// The flight recorder: the last calls of one communicator, kept at all times, written out when
// something goes wrong.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace lockstep::flight {

enum class State : std::uint8_t { queued, started, finished, failed };

const char* name(State state);

// One call. Times are nanoseconds of the monotonic clock, 0 where not reached.
struct Entry {
  std::uint64_t number = 0;    // of the entry in this recorder, from 1
  std::uint64_t sequence = 0;  // of the call in its group; 0 for calls that are not numbered
  std::string operation;       // "all_reduce"
  std::string summary;         // "all_reduce #7 (sum of 1024 float32)"
  std::string call_site;       // "train.cpp:42"
  State state = State::queued;
  std::int64_t queued_ns = 0;
  std::int64_t started_ns = 0;
  std::int64_t finished_ns = 0;
};

// What the recorder is told of a call: plain data, no allocation. `summarize` makes the text only
// when a dump is asked for.
struct Record {
  std::uint64_t sequence = 0;
  const char* operation = "";              // static lifetime
  std::uint64_t detail[4] = {0, 0, 0, 0};  // for summarize
  const char* file = "";                   // static lifetime (std::source_location)
  std::uint32_t line = 0;
};

// A ring of entries. Lock-free and allocation-free to write: record() and mark() may be called
// from different threads. Readers get a consistent copy of each entry or skip it.
class Recorder {
 public:
  using Summarize = std::string (*)(const Record&);

  Recorder(std::string group, int rank, std::vector<int> global_ranks, Summarize summarize,
           std::size_t capacity = 256);

  const std::string& group() const { return group_; }
  int rank() const { return rank_; }
  const std::vector<int>& global_ranks() const { return global_ranks_; }

  // Notes a new call as queued; returns its number.
  std::uint64_t record(const Record& record);

  // Notes that a call has changed state.
  void mark(std::uint64_t number, State state);

  // Oldest first.
  std::vector<Entry> entries() const;

 private:
  struct Slot {
    std::atomic<std::uint64_t> number{0};
    Record record;
    std::atomic<State> state{State::queued};
    std::atomic<std::int64_t> queued_ns{0};
    std::atomic<std::int64_t> started_ns{0};
    std::atomic<std::int64_t> finished_ns{0};
  };

  std::string group_;
  int rank_;
  std::vector<int> global_ranks_;
  Summarize summarize_;
  std::size_t capacity_;
  std::unique_ptr<Slot[]> slots_;
  std::atomic<std::uint64_t> next_{1};
};

}  // namespace lockstep::flight
