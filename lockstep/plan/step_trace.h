// What a forward and backward pass does to memory, in order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lockstep::plan {

// Of one micro-batch on one rank that holds the whole model: measured on a module, or worked out
// from a model's sizes. Parameters themselves are left out, and so are gradients that have come:
// where these lie, and for how long, is what strategies differ in.
struct StepTrace {
  enum class Kind : std::uint8_t {
    use,       // an operator reads a parameter
    gradient,  // a parameter's gradient is complete
  };
  struct Event {
    Kind kind = Kind::use;
    std::size_t parameter = 0;    // its number in ModelSizes
    std::int64_t peak_bytes = 0;  // the most at once since the event before; a gradient that comes
                                  // is among it until it has
  };

  std::vector<Event> events;
  std::int64_t peak_bytes_after = 0;  // the last event
  std::int64_t saved_bytes = 0;       // between forward and backward

  // Of all of them.
  std::int64_t peak_bytes() const;
};

}  // namespace lockstep::plan
