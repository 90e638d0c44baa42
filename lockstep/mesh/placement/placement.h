// The part of a logical tensor that a rank holds. Plain numbers: no LibTorch, no communication.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace lockstep::mesh {

// [begin, end)
struct Interval {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  std::int64_t size() const { return end - begin; }
  bool contains(std::int64_t value) const { return begin <= value && value < end; }
  bool operator==(const Interval&) const = default;
};

// How sizes that do not divide are cut.
enum class Uneven {
  balanced,  // 10 in 4: 3 3 2 2; no two parts differ by more than one
  chunked,   // 10 in 4: 3 3 3 1; all but the last are equal, as torch::chunk and padded shards have
             // it
};

// Part `index` of `parts` of [0, size). UsageError where index or parts make no sense.
Interval part_of(std::int64_t size, int index, int parts, Uneven uneven = Uneven::balanced);

// A box of the logical tensor (tensor parallelism cuts dimensions) and within it a range of its
// row-major order (sharding cuts that). What a rank stores is that range, densely, in that order:
// "local offset" is the place of an element in it. Offsets and sizes are in elements.
//
// A value: immutable, cheap to copy, thread-safe. Cuts compose; each is relative to what the
// placement holds. UsageError where a cut makes no sense; InternalError never.
class Placement {
 public:
  using Shape = std::vector<std::int64_t>;

  // The whole of a tensor; a shape of no dims is a scalar. UsageError for a negative size, or one
  // whose elements do not fit into 63 bits.
  static Placement full(Shape shape);

  // Part `index` of `parts` of the box along a dim (negative counts from the last, as in torch).
  // Only of whole boxes: a box is cut before its flat order is.
  Placement cut_dim(int dim, int index, int parts, Uneven uneven = Uneven::balanced) const;
  // Along the same, parts of given sizes, which must add up to what the box has there.
  Placement cut_dim(int dim, int index, std::span<const std::int64_t> sizes) const;
  // Along the same, an explicit part, counted from the box's own begin.
  Placement cut_dim(int dim, Interval part) const;

  // Part `index` of `parts` of the elements held, in row-major order.
  Placement cut_flat(int index, int parts, Uneven uneven = Uneven::balanced) const;
  // An explicit part, in local offsets.
  Placement cut_flat(Interval part) const;

  const Shape& shape() const { return shape_; }              // of the logical tensor
  const std::vector<Interval>& box() const { return box_; }  // for each dim, in logical coordinates
  Interval range() const { return range_; }                  // in the box's row-major order
  Shape box_shape() const;

  std::int64_t elements() const { return range_.size(); }
  bool empty() const { return elements() == 0; }
  bool whole_box() const { return range_.begin == 0 && range_.end == box_elements_; }
  bool whole_tensor() const { return elements() == logical_elements_; }
  std::int64_t logical_elements() const { return logical_elements_; }

  // Between local offsets and the logical tensor's row-major order or its coordinates. An index
  // outside of the tensor, or a local offset outside of the storage, is a UsageError.
  bool contains(std::int64_t logical) const { return local_offset(logical).has_value(); }
  bool contains(std::span<const std::int64_t> coordinates) const;
  std::optional<std::int64_t> local_offset(std::int64_t logical) const;
  std::optional<std::int64_t> local_offset(std::span<const std::int64_t> coordinates) const;
  std::int64_t logical_index(std::int64_t local) const;
  Shape coordinates(std::int64_t local) const;

  // This placement for the tensor viewed in another shape with as many elements. Throws a
  // UsageError unless the box is the whole tensor.
  Placement in_shape(Shape shape) const;
  bool has_whole_box_of_tensor() const { return box_elements_ == logical_elements_; }

  // Compares shape, box and range. Two placements may differ and hold the same elements.
  bool operator==(const Placement&) const = default;

  // "[0:4, 2:6] of [8, 6]", "elements 3:9 of [0:4, 2:6] of [8, 6]"
  std::string text() const;

 private:
  Placement(Shape shape, std::vector<Interval> box, Interval range);

  int checked_dim(int dim) const;

  Shape shape_;
  std::vector<Interval> box_;
  Interval range_;
  std::int64_t box_elements_ = 0;
  std::int64_t logical_elements_ = 0;
};

// A stretch of elements that two placements share and that lies densely in the storage of both.
struct SharedRun {
  std::int64_t a_offset = 0;
  std::int64_t b_offset = 0;
  std::int64_t count = 0;

  bool operator==(const SharedRun&) const = default;
};

// The elements two placements of one logical tensor share, each exactly once, in row-major order,
// as few runs as possible. Work is proportional to the number of runs, not of elements.
// UsageError where they are of different shapes.
std::vector<SharedRun> intersect(const Placement& a, const Placement& b);

// Calls `visit` for each run of intersect(), without making a list.
void for_each_run(const Placement& a, const Placement& b,
                  const std::function<void(const SharedRun&)>& visit);

// How many elements they share; takes no time however many runs those are.
std::int64_t common_elements(const Placement& a, const Placement& b);

}  // namespace lockstep::mesh
