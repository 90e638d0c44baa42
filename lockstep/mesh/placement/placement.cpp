#include <lockstep/mesh/placement/placement.h>

#include <algorithm>
#include <numeric>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>

namespace lockstep::mesh {

namespace {

std::int64_t product(std::span<const std::int64_t> sizes) {
  std::int64_t result = 1;
  for (const std::int64_t size : sizes) result *= size;
  return result;
}

// Also where a later size is zero: the strides in between must fit as well.
std::int64_t checked_product(const Placement::Shape& shape) {
  std::int64_t nonzero = 1;
  bool zero = false;
  for (const std::int64_t size : shape) {
    if (size < 0)
      throw UsageError("a tensor of shape [{}]: sizes must not be negative",
                       fmt::join(shape, ", "));
    if (size == 0) {
      zero = true;
    } else if (__builtin_mul_overflow(nonzero, size, &nonzero)) {
      throw UsageError("a tensor of shape [{}] has more elements than 63 bits can count",
                       fmt::join(shape, ", "));
    }
  }
  return zero ? 0 : nonzero;
}

void check_part(const char* what, Interval part, std::int64_t size) {
  if (part.begin < 0 || part.begin > part.end || part.end > size)
    throw UsageError("{}: [{}, {}) is no part of [0, {})", what, part.begin, part.end, size);
}

void check_same_shape(const Placement& a, const Placement& b) {
  if (a.shape() != b.shape())
    throw UsageError("placements of different tensors: shapes [{}] and [{}]",
                     fmt::join(a.shape(), ", "), fmt::join(b.shape(), ", "));
}

}  // namespace

Interval part_of(std::int64_t size, int index, int parts, Uneven uneven) {
  if (size < 0) throw UsageError("a size of {} cannot be cut", size);
  if (parts < 1 || index < 0 || index >= parts)
    throw UsageError("part {} of {}: parts are numbered from 0 and there must be at least one",
                     index, parts);
  if (uneven == Uneven::chunked) {
    const std::int64_t chunk = size / parts + (size % parts != 0 ? 1 : 0);
    // chunk × parts may pass 63 bits, so the product is compared and not formed.
    const auto edge = [&](int i) { return chunk > 0 && i > size / chunk ? size : i * chunk; };
    return {std::min(edge(index), size), std::min(edge(index + 1), size)};
  }
  const std::int64_t each = size / parts;
  const std::int64_t longer = size % parts;
  const auto edge = [&](int i) { return i * each + std::min<std::int64_t>(i, longer); };
  return {edge(index), edge(index + 1)};
}

Placement::Placement(Shape shape, std::vector<Interval> box, Interval range)
    : shape_(std::move(shape)), box_(std::move(box)), range_(range) {
  box_elements_ = product(box_shape());
  logical_elements_ = product(shape_);
}

Placement Placement::full(Shape shape) {
  const std::int64_t elements = checked_product(shape);
  std::vector<Interval> box;
  for (const std::int64_t size : shape) box.push_back({0, size});
  return {std::move(shape), std::move(box), {0, elements}};
}

Placement::Shape Placement::box_shape() const {
  Shape sizes;
  for (const Interval& side : box_) sizes.push_back(side.size());
  return sizes;
}

int Placement::checked_dim(int dim) const {
  const int num_dims = static_cast<int>(shape_.size());
  const int counted = dim < 0 ? dim + num_dims : dim;
  if (counted < 0 || counted >= num_dims)
    throw UsageError("dim {} of a tensor of shape [{}], which has {} dims", dim,
                     fmt::join(shape_, ", "), num_dims);
  if (!whole_box())
    throw UsageError("{} cannot be cut along dim {}: cut dims first, then the flat order", text(),
                     dim);
  return counted;
}

Placement Placement::cut_dim(int dim, Interval part) const {
  const auto at = static_cast<std::size_t>(checked_dim(dim));
  check_part("cut along a dim", part, box_[at].size());
  std::vector<Interval> box = box_;
  box[at] = {box_[at].begin + part.begin, box_[at].begin + part.end};
  std::int64_t elements = 1;
  for (const Interval& side : box) elements *= side.size();
  return {shape_, std::move(box), {0, elements}};
}

Placement Placement::cut_dim(int dim, int index, int parts, Uneven uneven) const {
  const auto at = static_cast<std::size_t>(checked_dim(dim));
  return cut_dim(dim, part_of(box_[at].size(), index, parts, uneven));
}

Placement Placement::cut_dim(int dim, int index, std::span<const std::int64_t> sizes) const {
  const auto at = static_cast<std::size_t>(checked_dim(dim));
  std::int64_t sum = 0;
  bool sane = true;
  for (const std::int64_t size : sizes)
    sane = sane && size >= 0 && !__builtin_add_overflow(sum, size, &sum);
  if (!sane || sum != box_[at].size())
    throw UsageError("parts of sizes [{}] along dim {} must add up to the {} there are",
                     fmt::join(sizes, ", "), dim, box_[at].size());
  if (index < 0 || static_cast<std::size_t>(index) >= sizes.size())
    throw UsageError("part {} of {}: parts are numbered from 0", index, sizes.size());
  const std::int64_t begin = std::accumulate(sizes.begin(), sizes.begin() + index, std::int64_t{0});
  return cut_dim(dim, Interval{begin, begin + sizes[static_cast<std::size_t>(index)]});
}

Placement Placement::cut_flat(Interval part) const {
  check_part("cut of the flat order", part, elements());
  return {shape_, box_, {range_.begin + part.begin, range_.begin + part.end}};
}

Placement Placement::cut_flat(int index, int parts, Uneven uneven) const {
  return cut_flat(part_of(elements(), index, parts, uneven));
}

Placement Placement::in_shape(Shape shape) const {
  const Placement whole = full(std::move(shape));
  if (!has_whole_box_of_tensor() || whole.logical_elements_ != logical_elements_)
    throw UsageError("{} is not a part of the flat order of a tensor of shape [{}]", text(),
                     fmt::join(whole.shape_, ", "));
  return whole.cut_flat(range_);
}

std::optional<std::int64_t> Placement::local_offset(
    std::span<const std::int64_t> coordinates) const {
  if (coordinates.size() != shape_.size())
    throw UsageError("{} coordinates for a tensor of {} dims", coordinates.size(), shape_.size());
  bool inside = true;
  std::int64_t flat = 0;
  for (std::size_t d = 0; d < shape_.size(); ++d) {
    if (coordinates[d] < 0 || coordinates[d] >= shape_[d])
      throw UsageError("element [{}] of a tensor of shape [{}]", fmt::join(coordinates, ", "),
                       fmt::join(shape_, ", "));
    inside = inside && box_[d].contains(coordinates[d]);
    if (inside) flat = flat * box_[d].size() + (coordinates[d] - box_[d].begin);
  }
  if (!inside || !range_.contains(flat)) return std::nullopt;
  return flat - range_.begin;
}

bool Placement::contains(std::span<const std::int64_t> coordinates) const {
  return local_offset(coordinates).has_value();
}

std::optional<std::int64_t> Placement::local_offset(std::int64_t logical) const {
  if (logical < 0 || logical >= logical_elements_)
    throw UsageError("element {} of a tensor of {}", logical, logical_elements_);
  Shape at(shape_.size());
  for (std::size_t d = shape_.size(); d-- > 0; logical /= shape_[d]) at[d] = logical % shape_[d];
  return local_offset(at);
}

Placement::Shape Placement::coordinates(std::int64_t local) const {
  if (local < 0 || local >= elements())
    throw UsageError("element {} of a part of {}", local, elements());
  std::int64_t flat = range_.begin + local;
  Shape at(shape_.size());
  for (std::size_t d = shape_.size(); d-- > 0; flat /= box_[d].size())
    at[d] = box_[d].begin + flat % box_[d].size();
  return at;
}

std::int64_t Placement::logical_index(std::int64_t local) const {
  const Shape at = coordinates(local);
  std::int64_t flat = 0;
  for (std::size_t d = 0; d < shape_.size(); ++d) flat = flat * shape_[d] + at[d];
  return flat;
}

std::string Placement::text() const {
  std::vector<std::string> sides;
  for (const Interval& side : box_) sides.push_back(fmt::format("{}:{}", side.begin, side.end));
  const std::string box =
      fmt::format("[{}] of [{}]", fmt::join(sides, ", "), fmt::join(shape_, ", "));
  if (whole_box()) return box;
  return fmt::format("elements {}:{} of {}", range_.begin, range_.end, box);
}

namespace {

// The common box of two placements. An element's place in its row-major order grows with the place
// in either's box, so what both ranges leave of it is one interval.
class Overlap {
 public:
  Overlap(const Placement& a, const Placement& b) : a_(a), b_(b) {
    check_same_shape(a, b);
    const std::size_t num_dims = a.shape().size();
    sides_.resize(num_dims);
    stride_a_.resize(num_dims);
    stride_b_.resize(num_dims);
    std::int64_t stride_a = 1;
    std::int64_t stride_b = 1;
    // Dims from the last on which all three boxes agree lie densely in both storages, and so does
    // the first one after them.
    bool dense = true;
    for (std::size_t d = num_dims; d-- > 0;) {
      const Interval side_a = a.box()[d];
      const Interval side_b = b.box()[d];
      sides_[d] = {std::max(side_a.begin, side_b.begin), std::min(side_a.end, side_b.end)};
      if (sides_[d].size() <= 0) {
        common_ = {0, 0};
        return;
      }
      stride_a_[d] = stride_a;
      stride_b_[d] = stride_b;
      stride_a *= side_a.size();
      stride_b *= side_b.size();
      elements_ *= sides_[d].size();
      if (dense) dense_ = elements_;
      dense = dense && side_a == side_b;
      base_a_ += (sides_[d].begin - side_a.begin) * stride_a_[d];
      base_b_ += (sides_[d].begin - side_b.begin) * stride_b_[d];
    }
    const auto first = [&](auto place, std::int64_t bound) {
      std::int64_t low = 0;
      std::int64_t high = elements_;
      while (low < high) {
        const std::int64_t middle = low + (high - low) / 2;
        if ((this->*place)(middle) < bound)
          low = middle + 1;
        else
          high = middle;
      }
      return low;
    };
    common_.begin = std::max(first(&Overlap::place_a, a.range().begin),
                             first(&Overlap::place_b, b.range().begin));
    common_.end = std::max(common_.begin, std::min(first(&Overlap::place_a, a.range().end),
                                                   first(&Overlap::place_b, b.range().end)));
  }

  std::int64_t elements() const { return common_.size(); }

  template <typename Visit>
  void for_each_run(const Visit& visit) const {
    for (std::int64_t at = common_.begin; at < common_.end;) {
      const std::int64_t end = std::min(common_.end, (at / dense_ + 1) * dense_);
      visit(SharedRun{place_a(at) - a_.range().begin, place_b(at) - b_.range().begin, end - at});
      at = end;
    }
  }

 private:
  // Where the element at a place of the common box stands in the box of a, or of b.
  std::int64_t place(std::int64_t at, std::int64_t base, const Placement::Shape& stride) const {
    std::int64_t result = base;
    for (std::size_t d = sides_.size(); d-- > 0 && at != 0; at /= sides_[d].size())
      result += at % sides_[d].size() * stride[d];
    return result;
  }
  std::int64_t place_a(std::int64_t at) const { return place(at, base_a_, stride_a_); }
  std::int64_t place_b(std::int64_t at) const { return place(at, base_b_, stride_b_); }

  const Placement& a_;
  const Placement& b_;
  std::vector<Interval> sides_;
  Placement::Shape stride_a_;
  Placement::Shape stride_b_;
  std::int64_t base_a_ = 0;
  std::int64_t base_b_ = 0;
  std::int64_t elements_ = 1;
  std::int64_t dense_ = 1;  // elements of the common box that lie together in both storages
  Interval common_;         // in the common box's row-major order
};

}  // namespace

void for_each_run(const Placement& a, const Placement& b,
                  const std::function<void(const SharedRun&)>& visit) {
  Overlap(a, b).for_each_run(visit);
}

std::vector<SharedRun> intersect(const Placement& a, const Placement& b) {
  std::vector<SharedRun> runs;
  Overlap(a, b).for_each_run([&](const SharedRun& run) { runs.push_back(run); });
  return runs;
}

std::int64_t common_elements(const Placement& a, const Placement& b) {
  return Overlap(a, b).elements();
}

}  // namespace lockstep::mesh
