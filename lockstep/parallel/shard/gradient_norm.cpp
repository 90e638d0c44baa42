#include <lockstep/parallel/shard/gradient_norm.h>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/base/error.h>
#include <lockstep/optim/sum_of_squares.h>

namespace lockstep::shard {

namespace {

using mesh::Interval;
using optim::kNormBlock;

std::int64_t block_begin(std::int64_t element) { return element / kNormBlock * kNormBlock; }

std::int64_t block_end(std::int64_t element, std::int64_t size) {
  return std::min(size, block_begin(element) + kNormBlock);
}

// The rank that sums a block: the one that has its first element.
int summing_rank(const GradientPiece& piece, std::int64_t block) {
  for (std::size_t rank = 0; rank < piece.ranges.size(); ++rank)
    if (piece.ranges[rank].contains(block)) return static_cast<int>(rank);
  LOCKSTEP_CHECK(false, "no rank holds element {}", block);
}

std::int64_t size_of(const GradientPiece& piece) {
  std::int64_t size = 0;
  for (const Interval& range : piece.ranges) size = std::max(size, range.end);
  return size;
}

// A rank's part of a block that began on a rank before it; empty where there is none.
Interval continuation(const GradientPiece& piece, int rank) {
  const Interval mine = piece.ranges[static_cast<std::size_t>(rank)];
  if (mine.size() == 0 || mine.begin % kNormBlock == 0) return {mine.begin, mine.begin};
  return {mine.begin, std::min(mine.end, block_end(mine.begin, size_of(piece)))};
}

// Elements that ranks send to those before them, parameter by parameter.
class Continuations {
 public:
  Continuations(const std::vector<GradientPiece>& pieces, comm::Communicator& group,
                c10::Device device)
      : from_(static_cast<std::size_t>(group.size())) {
    std::vector<std::vector<at::Tensor>> to(from_.size());
    std::vector<std::int64_t> sizes(from_.size());
    const at::TensorOptions options = at::dtype(at::kDouble).device(device);
    for (const GradientPiece& piece : pieces) {
      for (int rank = 0; rank < group.size(); ++rank) {
        const Interval part = continuation(piece, rank);
        if (part.size() == 0) continue;
        const int target = summing_rank(piece, block_begin(part.begin));
        if (rank == group.rank()) {
          to[static_cast<std::size_t>(target)].push_back(
              piece.values.narrow(0, 0, part.size()).to(at::kDouble));
        } else if (target == group.rank()) {
          sizes[static_cast<std::size_t>(rank)] += part.size();
        }
      }
    }
    std::vector<at::Tensor> inputs, outputs;
    for (std::size_t rank = 0; rank < from_.size(); ++rank) {
      inputs.push_back(to[rank].empty() ? at::empty({0}, options) : at::cat(to[rank]).to(device));
      outputs.push_back(at::empty({sizes[rank]}, options));
    }
    group.all_to_all(outputs, inputs).wait();
    for (std::size_t rank = 0; rank < from_.size(); ++rank)
      from_[rank].values = outputs[rank].to(pieces.front().values.device());
  }

  // The next elements that a rank has sent.
  at::Tensor next(int rank, std::int64_t count) {
    Received& received = from_[static_cast<std::size_t>(rank)];
    received.taken += count;
    return received.values.narrow(0, received.taken - count, count);
  }

 private:
  struct Received {
    at::Tensor values;
    std::int64_t taken = 0;
  };

  std::vector<Received> from_;
};

// The blocks that begin on this rank: those that lie on it, and the one that others continue.
void add_own_blocks(const GradientPiece& piece, int rank, Continuations& continuations,
                    std::vector<at::Tensor>& blocks) {
  const Interval mine = piece.ranges[static_cast<std::size_t>(rank)];
  const std::int64_t begin = continuation(piece, rank).end;
  if (begin >= mine.end) return;
  const std::int64_t last = block_begin(mine.end - 1);
  std::vector<at::Tensor> parts{piece.values.narrow(0, last - mine.begin, mine.end - last)};
  for (int other = rank + 1; other < static_cast<int>(piece.ranges.size()); ++other) {
    const Interval part = continuation(piece, other);
    if (part.size() > 0 && block_begin(part.begin) == last)
      parts.push_back(continuations.next(other, part.size()));
  }
  blocks.push_back(piece.values.narrow(0, begin - mine.begin, last - begin));
  blocks.push_back(parts.size() == 1 ? parts.front() : at::cat(parts));
}

// The sums of all blocks on every rank, and where in them the blocks of each piece are.
struct BlockSums {
  at::Tensor values;
  std::vector<std::vector<Interval>> of_pieces;
};

// `pieces` are not empty.
BlockSums gather_block_sums(const std::vector<GradientPiece>& pieces, comm::Communicator& group,
                            c10::Device device) {
  const auto options = at::dtype(at::kDouble).device(device);
  Continuations continuations(pieces, group, device);
  std::vector<at::Tensor> blocks;
  for (const GradientPiece& piece : pieces)
    add_own_blocks(piece, group.rank(), continuations, blocks);
  const at::Tensor mine = optim::sums_of_squares(blocks).to(device);

  // Every rank's sums, one rank after the other; added in the order of parameters and ranks.
  std::vector<std::int64_t> begins = {0};
  std::vector<std::vector<Interval>> sums(pieces.size());
  for (int rank = 0; rank < group.size(); ++rank) {
    std::int64_t place = begins.back();
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      const Interval range = pieces[i].ranges[static_cast<std::size_t>(rank)];
      const std::int64_t begin = continuation(pieces[i], rank).end;
      const std::int64_t count = (range.end - begin + kNormBlock - 1) / kNormBlock;
      sums[i].push_back({place, place + count});
      place += count;
    }
    begins.push_back(place);
  }
  const at::Tensor all = at::empty({begins.back()}, options);
  std::vector<at::Tensor> of_ranks;
  for (std::size_t rank = 0; rank + 1 < begins.size(); ++rank)
    of_ranks.push_back(all.narrow(0, begins[rank], begins[rank + 1] - begins[rank]));
  group.all_gather(of_ranks, mine).wait();
  return {all, std::move(sums)};
}

}  // namespace

at::Tensor gradient_sum_of_squares(const std::vector<GradientPiece>& pieces,
                                   comm::Communicator& group, c10::Device device) {
  const c10::NoGradGuard no_grad;
  if (pieces.empty()) return at::zeros({}, at::dtype(at::kDouble).device(device));
  const BlockSums sums = gather_block_sums(pieces, group, device);
  return optim::add_in_order(sums.values, sums.of_pieces);
}

std::vector<double> sums_of_squares(const std::vector<GradientPiece>& pieces,
                                    comm::Communicator& group, c10::Device device) {
  const c10::NoGradGuard no_grad;
  if (pieces.empty()) return {};
  const BlockSums sums = gather_block_sums(pieces, group, device);
  const at::Tensor values = sums.values.cpu();
  std::vector<double> each;
  for (const std::vector<Interval>& blocks : sums.of_pieces)
    each.push_back(optim::add_in_order(values, {blocks}).item<double>());
  return each;
}

}  // namespace lockstep::shard
