// How what a rank did by itself went, and what it says of it to the others.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <lockstep/distributed/rank_messages.h>

namespace lockstep {

struct Outcome {
  enum class Kind : char {
    done = 'd',
    failed = 'f',
    found_damage = 'x',  // in a checkpoint
  };
  Kind kind = Kind::done;
  std::string text = {};  // what there is to say, or why it failed
};

// Of work whose exceptions end here: the ranks are to go on together, whatever happens to this one.
Outcome outcome_of(const std::function<std::string()>& work);

// Every rank's, on every rank, in their order.
std::vector<Outcome> tell_all(const RankMessages& ranks, const Outcome& mine);

}  // namespace lockstep
