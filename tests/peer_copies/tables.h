// The behaviour of a rank in a job of four, by the arguments of the test program.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include <lockstep/recovery/peer_copies.h>
#include <tests/ranks/cells.h>

namespace lockstep::peer_copies {

// Ranks are lost in name only: their processes go on with nothing in their memory.
void check_copies(ranks::Cells& cells);
// The same for models in one layout, restored in others.
void check_layouts(ranks::Cells& cells, const std::string& folder);

// Rank 2 ends, as if killed, while it copies its share; or, in the second function, `delay_ms`
// after it has begun to send the share. The others go on from the copies that they hold.
void lose_while_copying(ranks::Cells& cells);
void lose_while_sending(ranks::Cells& cells, int delay_ms);

// A world of the given members in that order: {0, 3, 2} has rank 3 as its second. Every rank of the
// group calls it; other ranks get none.
inline std::shared_ptr<comm::Communicator> world_of(const ranks::Cells& cells,
                                                    const std::vector<int>& members) {
  const auto found = std::find(members.begin(), members.end(), cells.rank());
  return cells.group()->split(found == members.end() ? -1 : 0,
                              static_cast<int>(found - members.begin()), "formed anew");
}

}  // namespace lockstep::peer_copies
