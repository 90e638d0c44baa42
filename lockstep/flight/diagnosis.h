// What a job hangs on: who waits for whom, followed to its end.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <lockstep/flight/standing.h>

namespace lockstep::flight {

// One rank in a call that it cannot leave before others come.
struct Wait {
  int rank = 0;
  const Group* group = nullptr;
  const Entry* call = nullptr;
  const Dump* dump = nullptr;
  std::vector<int> for_ranks;  // who has not come; empty: everyone has
};

// Ranks are the job's, ascending.
struct Finding {
  enum class Kind : std::uint8_t {
    mismatch,      // `variants`: ranks made different calls under one number
    never_called,  // `ranks` are outside of any call, and others wait for them
    silent,        // `ranks` left no dump, and others wait for them
    lost,          // the same, and a group was told that their processes are gone
    came_late,     // `ranks` came when others had given up, at least `seconds` after the first
    circle,        // `chain`: ranks wait for each other
    all_there,     // every rank of the group is in the call, and it does not end
  };
  struct Variant {
    const Entry* call = nullptr;
    std::vector<int> ranks;
  };

  Kind kind = Kind::never_called;
  std::vector<int> ranks;        // to look at
  const Group* group = nullptr;  // where they are waited for, and
  const Entry* call = nullptr;   // in which call,
  int waiter = -1;               // that this rank made
  std::vector<int> waiting;      // for them, directly or through others
  double seconds = 0;            // the longest that one of those waits
  bool given_up = false;         // a wait has ended in an error
  std::vector<Wait> chain;       // the longest way to them, each for the one after it
  std::vector<Variant> variants;
};

// The finding that most ranks wait for comes first, mismatches before all. Empty where no rank is
// in a call.
std::vector<Finding> diagnose(const Standing& standing);

// The longest that a rank has been in a call that did not fail, and whether one did.
struct Longest {
  double seconds = 0;
  bool failed = false;
};
Longest longest_wait(const Standing& standing);

const char* name(Finding::Kind kind);

}  // namespace lockstep::flight
