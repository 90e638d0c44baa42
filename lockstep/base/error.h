// The three kinds of error: everything that Lockstep throws is one of these.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>
#include <version>

#if defined(__cpp_lib_source_location)
#include <source_location>
#else  // clang before 16, with which clang-tidy reads our headers
#include <experimental/source_location>
#endif

#include <spdlog/fmt/fmt.h>

namespace lockstep {

// The common base, for callers who only want to tell our errors from others'.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The caller's mistake, or something about the machine that the caller can change. The text says
// what is wrong, with the numbers, and what to do about it.
class UsageError : public Error {
 public:
  using Error::Error;

  template <typename... Args>
  explicit UsageError(fmt::format_string<Args...> format, Args&&... args)
      : Error(fmt::format(format, std::forward<Args>(args)...)) {}
};

// The kinds of failure between ranks.
enum class Fault : std::uint8_t {
  timeout,    // a deadline passed; `ranks` are those that did not arrive
  peer_lost,  // a process died, or its connection is gone for good
  mismatch,   // ranks made different calls
  aborted,    // a rank called abort(), or the group failed in an earlier call
  corrupted,  // bytes arrived that fail their checksum or break the protocol
  refused,    // a peer could not prove that it knows the job's secret
  engine,     // an engine below us (NCCL, MPI, Gloo) reported an error of its own
};

const char* fault_name(Fault fault);

// A failure of communication. Names the operation, the group, the ranks at fault and the position
// of the call in the group's sequence of calls.
class CommError : public Error {
 public:
  struct Details {
    Fault fault = Fault::aborted;
    std::string operation;       // "all_reduce", or what was being set up
    std::string group;           // the group's name, "world" for all ranks
    std::uint64_t sequence = 0;  // number of the call in its group, from 1; 0 before any
    std::vector<int> ranks;      // group-local ranks at fault, ascending
    std::string explanation;     // one or two sentences for a person
    int found_by = -1;           // the rank that found it, where that is another one
    // The job's rank of each member of the group: where they are other numbers than the group's,
    // the text gives both. Empty where the group is not known.
    std::vector<int> global_ranks{};
  };

  explicit CommError(Details details);

  const Details& details() const { return details_; }
  Fault fault() const { return details_.fault; }
  const std::vector<int>& ranks() const { return details_.ranks; }
  // The ranks at fault by their numbers in the job, ascending. Where the group is not known, its
  // numbers are taken for the job's.
  std::vector<int> global_ranks() const;

 private:
  Details details_;
};

// A bug of ours: thrown by LOCKSTEP_CHECK.
class InternalError : public Error {
 public:
  using Error::Error;
};

// The place that a function was called from.
#if defined(__cpp_lib_source_location)
using CallSite = std::source_location;
#else
using CallSite = std::experimental::source_location;
#endif

// "rank 3", "ranks 0, 2 and 5", "ranks 0-7 and 12": how every message of ours lists ranks.
std::string list_ranks(const std::vector<int>& ranks);

namespace internal {
[[noreturn]] void check_failed(const char* condition, const char* file, int line,
                               const std::string& message);
}  // namespace internal

}  // namespace lockstep

// Guards an invariant of our own code. Never use it on what a caller passed in.
#define LOCKSTEP_CHECK(condition, ...)                                   \
  do {                                                                   \
    if (!(condition)) [[unlikely]]                                       \
      ::lockstep::internal::check_failed(#condition, __FILE__, __LINE__, \
                                         ::fmt::format("" __VA_ARGS__)); \
  } while (false)
