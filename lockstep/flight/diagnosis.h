// What a job hangs on. The dumps are put in order, so that each rank has a place in each group;
// then the waits are followed from rank to rank to their end; then the answer is put into words.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <lockstep/flight/dump.h>

namespace lockstep::flight {

// One rank in one group.
struct Position {
  const Dump* dump = nullptr;
  // The first numbered call that is not finished, else the last; null where it made none, or where
  // point-to-point calls have pushed it out of the ring.
  const Entry* call = nullptr;
  std::uint64_t sequence = 0;       // of that call; 0 where it made none
  bool in_call = false;             // queued, started or failed
  const Entry* transfer = nullptr;  // the oldest call without a number that is not finished
};

// Ranks are the job's.
struct Group {
  std::string name;
  std::uint32_t generation = 0;
  std::vector<int> members;           // in the group's order
  std::map<int, Position> positions;  // of those that left a dump
  std::uint64_t furthest = 0;         // the highest sequence anyone stands at

  // Members that left no dump of this group, or have not come to this call of it; ascending.
  std::vector<int> missing_from(std::uint64_t sequence) const;
  // Whether a member is in a call, or behind others, or left no dump.
  bool in_trouble() const;
};

// Refers to the dumps it was made of.
struct Standing {
  std::vector<Group> groups;  // of the newest generation: those before it are over
  std::set<int> silent;       // members of a group that left no dump at all
};

Standing standing_of(const std::vector<Dump>& dumps);

// How long a call has been in its state, by its rank's own clock: since it was queued or started,
// how long until it failed, how long ago it finished.
double seconds_of(const Entry& entry, const Dump& dump);

// The job's ranks that a call without a number is with; ascending.
std::vector<int> peers_of(const Entry& entry, const Group& group);

// "all_reduce #7", "exchange with rank 5": a call in the words of the job's ranks.
std::string short_name(const Entry& entry, const Group& group);

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

// The answer first, what else helps indented below it. Ends in a newline.
std::string verdict(const Standing& standing);

// "31.0 s", "12 min 5 s", "3 h 12 min".
std::string duration_text(double seconds);

}  // namespace lockstep::flight
