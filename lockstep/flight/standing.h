// The dumps of a job put in order: in each group, where each rank stands.
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

// Whom a call without a number is with, as the job calls them; ascending.
std::vector<int> peers_of(const Entry& entry, const Group& group);

// "all_reduce #7", "exchange with rank 5": a call in the words of the job's ranks.
std::string short_name(const Entry& entry, const Group& group);

}  // namespace lockstep::flight
