// Ranks that train together have been told the same things. Where one reads an older config, or
// another file of the same name, each would train something else, and nobody would know.
#pragma once

#include <string>
#include <vector>

#include <lockstep/distributed/rank_messages.h>

namespace lockstep {

// Every rank calls it, with a line for each thing, as "seed is 7". UsageError on all of them where
// a rank's lines are others than rank 0's, with those that differ.
void check_told_the_same(const std::vector<std::string>& lines, const RankMessages& ranks);

}  // namespace lockstep
