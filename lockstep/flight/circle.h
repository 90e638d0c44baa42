// Ranks that wait for each other in calls of different groups, or for one that has refused to come,
// found while they wait.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/flight/recorder.h>

namespace lockstep::flight {

// A call that a thread is blocked in, as other ranks need to know it. Ranks are the job's.
struct BlockedCall {
  // Who has to come before the call can end on this rank.
  struct Need {
    int rank = 0;
    std::uint64_t message = 0;  // of an exchange: the message of that rank's that must come
  };

  int rank = 0;
  std::uint64_t thread = 0;
  std::string group;  // its id: the same on all of its ranks, and no other group's
  int rank_in_group = 0;
  std::uint64_t entry = 0;     // of the rank's recorder of that group
  std::uint64_t sequence = 0;  // 0 of an exchange
  std::uint64_t refusals = 0;  // of this rank, before the call
  std::string text;            // "all_reduce #7 (sum of 4 float32) of group 'tp' (train.cpp:42)"
  std::vector<Need> needs;

  // Whether it is the same wait of the same thread.
  bool same_wait(const BlockedCall& other) const {
    return rank == other.rank && thread == other.thread && group == other.group &&
           entry == other.entry;
  }
};

// One rank asks another: have you come to this call of ours, and if not, what keeps you?
struct Question {
  std::string group;
  std::uint64_t sequence = 0;
  int asker = 0;               // where the sequence is 0: have you sent to this rank of the group,
  std::uint64_t message = 0;   // this message?
  std::uint64_t refusals = 0;  // of the asker, so far (Recorder::num_refusals)

  std::string encode() const;
  // Nothing where it is none.
  static std::optional<Question> decode(std::string_view text);
};

struct Answer {
  enum class State : std::uint8_t {
    at_large,     // may come any time, or nothing is known of it
    came,         // has made the call
    came_and_in,  // and a thread is blocked in it
    blocked,      // has not, and cannot before `call` is over
    refused,      // has not, and has thrown an error instead which the asker has not
  };
  State state = State::at_large;
  BlockedCall call;
  std::string refusal = {};  // the error

  std::string encode() const;
  // at_large where it is none.
  static Answer decode(std::string_view text);
};

// The groups of one rank, and what its threads are blocked in. Thread-safe; keeps the recorders.
class OpenCalls {
 public:
  explicit OpenCalls(int rank) : rank_(rank) {}

  void add(const std::string& group, std::shared_ptr<const Recorder> recorder);
  void remove(const std::string& group);

  Answer answer(const Question& question) const;

  struct Wait {
    BlockedCall call;
    std::int64_t since_ns = 0;
  };
  // The calls that threads are blocked in, of those that need somebody.
  std::vector<Wait> waits() const;

 private:
  using Groups = std::map<std::string, std::shared_ptr<const Recorder>>;
  // A copy: recorders are read without the lock.
  Groups groups() const;
  std::optional<BlockedCall> describe(const std::string& group, const Recorder& recorder,
                                      const BlockedThread& blocked) const;

  const int rank_;
  mutable std::mutex mutex_;
  Groups groups_;
};

// Calls of which each waits for the rank of the next one, and the last for the rank of the first.
//
// Why a circle that was seen twice is no false alarm. Let all answers of the first look be older
// than all of the second, and let both name the same waits. A thread leaves a wait only when its
// call is over, so at the moment between the looks every thread of the circle was in its wait. In
// the second look no rank had come to the call that it is waited for in, so at that moment none
// had. From then on, each call of the circle ends only after a rank has come to it whose thread is
// blocked in the next call of the circle: none ever ends. It does not matter how slow ranks,
// networks or answers are, nor how many other calls are in flight: a thread that computes, or that
// has left calls in flight without waiting for them, is not blocked, and no circle goes through it.
//
// What "whose thread" rests on: the next call of a group comes from the thread that made its last
// one. Autograd's threads for devices count as the one that called backward() and waits for them
// (device/backward_thread.h): two of them must not make calls of different groups in one pass. So
// that programs that hand groups from thread to thread are not mistaken, a rank counts as blocked
// only where the last callers of all of its groups are.
struct Circle {
  std::vector<BlockedCall> calls;  // from the lowest rank on

  std::string text() const;
};

// The rank that found a circle tells this to every rank of the groups of its calls.
struct CircleNews {
  std::string group;
  std::vector<int> ranks;  // of the circle, as the job numbers them
  std::string text;

  std::string encode() const;
  // Nothing where it is none.
  static std::optional<CircleNews> decode(std::string_view text);
};

// And then this to the ranks of the circle: it names the call of theirs that is to end.
struct CallToEnd {
  std::string group;
  std::uint64_t thread = 0;
  std::uint64_t entry = 0;

  std::string encode() const;
  // Nothing where it is none.
  static std::optional<CallToEnd> decode(std::string_view text);
};

// Asks a rank of the job; at_large where it does not answer.
using Ask = std::function<Answer(int rank, const Question& question)>;

// A rank that does not come to a call, because it has thrown an error before it. What it refused is
// not refused where it is waited for: a backward pass of a model that only this rank has changed.
// Ranks that all refuse the same wait for nobody, and have each thrown as many errors.
struct Refusal {
  int rank = 0;  // the job's
  std::string reason;

  bool operator==(const Refusal&) const = default;
  std::string text() const;
};

// Asks those who have to come to a call.
std::optional<Refusal> find_refusal(const BlockedCall& from, const Ask& ask);

// Follows a wait to a circle, which need not come back to the wait itself. Where a rank before this
// one in the group is blocked in the same call, the search is left to it.
std::optional<Circle> find_circle(const BlockedCall& from, const Ask& ask);

// The second look: at one of the circle's calls, and at all of them.
bool still_waits(const Circle& circle, std::size_t call, const Ask& ask);
bool still_there(const Circle& circle, const Ask& ask);

}  // namespace lockstep::flight
