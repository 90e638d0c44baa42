// What goes between two stages, without its numbers.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep::pipeline {

// The shapes of what is between two stages, and which of it wants a gradient.
struct BoundaryShape {
  struct Entry {
    std::vector<std::int64_t> sizes;
    at::ScalarType type = at::kFloat;
    bool wants_gradient = false;

    bool operator==(const Entry&) const = default;
  };
  std::vector<Entry> entries;

  bool operator==(const BoundaryShape&) const = default;
  std::string text() const;  // "Float [4, 16, 32] with a gradient, Long [4, 16]"
};

BoundaryShape shape_of(const std::vector<at::Tensor>& tensors);

// As numbers, for another rank: how many tensors, then of each its type, whether it wants a
// gradient, its number of dims and their sizes. What is read takes memory for no more than there
// is; CommError (corrupted), which names the group, where the numbers are no shape.
std::vector<std::int64_t> to_numbers(const BoundaryShape& shape);
BoundaryShape shape_from(std::span<const std::int64_t> numbers, const std::string& group);

// The number of those numbers, as another rank said it. CommError (corrupted) where no shape has
// it.
std::int64_t checked_count(std::int64_t count, const std::string& group);

}  // namespace lockstep::pipeline
