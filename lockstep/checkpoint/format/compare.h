// Two checkpoints side by side, tensor by tensor, whatever pieces each lies in.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include <lockstep/checkpoint/format/reader.h>

namespace lockstep::checkpoint {

struct TensorDifference {
  enum class Kind {
    only_in_first,
    only_in_second,
    another_form,  // of another shape or type
    other_values,
  };

  std::string name;
  Kind kind = Kind::other_values;
  // Of other_values.
  std::int64_t elements = 0;   // of all
  std::int64_t differing = 0;  // by a bit or more
  // Of floating-point numbers, the largest difference; nothing where one of a pair is no number.
  std::optional<double> largest;
};

// Calls `visit` for each tensor that differs, in the order of names. Reads a stretch at a time.
// Failure: as CheckpointReader.
void compare(CheckpointReader& first, CheckpointReader& second,
             const std::function<void(const TensorDifference&)>& visit);

}  // namespace lockstep::checkpoint
