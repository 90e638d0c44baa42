#include <lockstep/checkpoint/format/coverage.h>

#include <algorithm>
#include <map>
#include <optional>
#include <vector>

namespace lockstep::checkpoint {

namespace {

using mesh::Interval;
using mesh::Placement;

constexpr std::int64_t kMostRuns = 1 << 22;

// Of those in any order.
std::int64_t size_of_union(std::vector<Interval> intervals) {
  std::ranges::sort(intervals, {}, &Interval::begin);
  std::int64_t size = 0;
  std::int64_t end = 0;
  for (const Interval& one : intervals) {
    size += std::max<std::int64_t>(0, one.end - std::max(one.begin, end));
    end = std::max(end, one.end);
  }
  return size;
}

bool are_apart(const std::vector<Interval>& a, const std::vector<Interval>& b) {
  for (std::size_t dim = 0; dim < a.size(); ++dim)
    if (a[dim].end <= b[dim].begin || b[dim].end <= a[dim].begin) return true;
  return false;
}

// A box, and what is held of its flat order.
struct BoxRanges {
  std::vector<Interval> box;
  std::vector<Interval> ranges;
};

std::vector<BoxRanges> by_box(const std::vector<Placement>& pieces) {
  std::map<std::vector<std::int64_t>, BoxRanges> found;
  for (const Placement& piece : pieces) {
    std::vector<std::int64_t> corners;
    for (const Interval& side : piece.box()) corners.insert(corners.end(), {side.begin, side.end});
    BoxRanges& same = found[corners];
    same.box = piece.box();
    same.ranges.push_back(piece.range());
  }
  std::vector<BoxRanges> all;
  for (auto& [corners, ranges] : found) all.push_back(std::move(ranges));
  return all;
}

// In the order of their first corners: what begins behind a box along the first dim, and all that
// follows, is apart from it.
bool all_apart(const std::vector<BoxRanges>& boxes) {
  for (std::size_t i = 0; i < boxes.size(); ++i)
    for (std::size_t k = i + 1; k < boxes.size(); ++k) {
      if (!boxes[i].box.empty() && boxes[k].box[0].begin >= boxes[i].box[0].end) break;
      if (!are_apart(boxes[i].box, boxes[k].box)) return false;
    }
  return true;
}

// The same pieces as parts of one shape, where they can be.
std::optional<std::vector<Placement>> in_one_shape(const std::vector<Placement>& pieces) {
  const Placement* cut = &pieces.front();
  for (const Placement& piece : pieces)
    if (!piece.has_whole_box_of_tensor()) cut = &piece;
  std::vector<Placement> alike;
  for (const Placement& piece : pieces) {
    if (piece.shape() != cut->shape() && !piece.has_whole_box_of_tensor()) return std::nullopt;
    alike.push_back(piece.shape() == cut->shape() ? piece : piece.in_shape(cut->shape()));
  }
  return alike;
}

// At most so many stretches of the tensor's flat order it takes.
std::int64_t most_runs(const Placement& piece) {
  const std::vector<std::int64_t>& shape = piece.shape();
  std::size_t dim = shape.size();
  while (dim > 0 && piece.box()[dim - 1].size() == shape[dim - 1]) --dim;
  std::int64_t runs = 1;
  for (std::size_t outer = 0; outer + 1 < dim; ++outer) runs *= piece.box()[outer].size();
  return std::min(runs, piece.elements());
}

std::int64_t covered_by_runs(const std::vector<Placement>& pieces) {
  std::vector<Interval> runs;
  std::int64_t most = 0;
  for (const Placement& piece : pieces) {
    most += most_runs(piece);
    if (most > kMostRuns)
      throw DamagedCheckpoint("its pieces overlap in more than {} places", kMostRuns);
    mesh::for_each_run(Placement::full(piece.shape()), piece, [&](const mesh::SharedRun& run) {
      runs.push_back({run.a_offset, run.a_offset + run.count});
    });
  }
  return size_of_union(std::move(runs));
}

}  // namespace

std::int64_t covered_elements(const TensorRecord& tensor) {
  std::vector<Placement> pieces;
  for (const Piece& piece : tensor.pieces)
    if (!piece.placement.empty()) pieces.push_back(piece.placement);
  if (pieces.empty()) return 0;
  if (const auto alike = in_one_shape(pieces)) {
    std::vector<BoxRanges> boxes = by_box(*alike);
    if (all_apart(boxes)) {
      std::int64_t covered = 0;
      for (BoxRanges& one : boxes) covered += size_of_union(std::move(one.ranges));
      return covered;
    }
  }
  return covered_by_runs(pieces);
}

}  // namespace lockstep::checkpoint
