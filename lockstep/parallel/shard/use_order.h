// The order in which a step uses its units, learned from the step before. Plain numbers.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

namespace lockstep::shard {

// Depends on nothing but the calls made to it, so that ranks that run the same program predict the
// same.
class UseOrder {
 public:
  // A unit is used, and it was not the last one that was. Returns the one that came after it the
  // last time; none where that is not known.
  std::optional<std::size_t> note(std::size_t unit);

  // The next step begins. Returns the unit that the last one began with.
  std::optional<std::size_t> start_over();

 private:
  std::vector<std::size_t> last_;
  std::vector<std::size_t> now_;
  std::size_t next_ = 0;  // in last_: what is expected
};

}  // namespace lockstep::shard
