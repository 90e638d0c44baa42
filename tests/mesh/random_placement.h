// Random placements, and a simple way to list the elements that they hold.
#pragma once

#include <random>
#include <vector>

#include <lockstep/mesh/placement/placement.h>

namespace lockstep::mesh::testing {

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}

  // A number in [low, high]. std::uniform_int_distribution would differ between libraries.
  int number(int low, int high) {
    return low + static_cast<int>(engine_() % static_cast<unsigned>(high - low + 1));
  }

  Placement::Shape shape() {
    Placement::Shape shape(static_cast<std::size_t>(number(0, 4)));
    for (auto& size : shape) size = number(0, 9) == 0 ? 0 : number(1, 6);
    return shape;
  }

  Interval part(std::int64_t size) {
    const int end = number(0, static_cast<int>(size));
    return {number(0, end), end};
  }

  // Cuts boxes in any of the possible ways, and then perhaps the flat order.
  Placement placement(const Placement::Shape& shape) {
    Placement result = Placement::full(shape);
    const int num_dims = static_cast<int>(shape.size());
    for (int cut = number(0, 3); cut > 0 && num_dims > 0; --cut) {
      const int dim = number(-num_dims, num_dims - 1);
      const auto at = static_cast<std::size_t>(dim < 0 ? dim + num_dims : dim);
      const int parts = number(1, 4);
      switch (number(0, 3)) {
        case 0: result = result.cut_dim(dim, number(0, parts - 1), parts); break;
        case 1: result = result.cut_dim(dim, number(0, parts - 1), parts, Uneven::chunked); break;
        case 2: result = result.cut_dim(dim, part(result.box()[at].size())); break;
        default: break;
      }
    }
    for (int cut = number(0, 2); cut > 0; --cut) {
      const int parts = number(1, 4);
      switch (number(0, 2)) {
        case 0: result = result.cut_flat(number(0, parts - 1), parts); break;
        case 1: result = result.cut_flat(number(0, parts - 1), parts, Uneven::chunked); break;
        default: result = result.cut_flat(part(result.elements()));
      }
    }
    return result;
  }

 private:
  std::mt19937 engine_;
};

// The logical index of each held element, in local order, found by testing every element of the
// tensor.
inline std::vector<std::int64_t> enumerate(const Placement& placement) {
  const auto& shape = placement.shape();
  std::vector<std::int64_t> held;
  std::int64_t in_box = 0;
  for (std::int64_t flat = 0; flat < placement.logical_elements(); ++flat) {
    std::int64_t rest = flat;
    bool inside = true;
    for (std::size_t d = shape.size(); d-- > 0; rest /= shape[d])
      inside = inside && placement.box()[d].contains(rest % shape[d]);
    if (inside && placement.range().contains(in_box++)) held.push_back(flat);
  }
  return held;
}

}  // namespace lockstep::mesh::testing
