// The algorithms that the collectives (collectives.h) choose from, each in a namespace of its own,
// and how they cut a row of elements into parts and pieces.
#pragma once

#include <algorithm>
#include <cstddef>

#include <lockstep/comm/algorithms/collectives.h>

namespace lockstep::comm {

struct Part {
  std::size_t begin = 0;
  std::size_t count = 0;
};

// Returns part `index` of `num_parts`. The lengths of the parts differ by at most one.
constexpr Part part_of(std::size_t count, std::size_t num_parts, std::size_t index) {
  const std::size_t begin =
      count / num_parts * index + (index < count % num_parts ? index : count % num_parts);
  return {begin, count / num_parts + (index < count % num_parts ? 1 : 0)};
}

// Calls visit(begin, count) for consecutive pieces of `longest` elements; the last piece may be
// shorter. An empty row is visited once, as one empty piece.
template <typename Visit>
void for_pieces(std::size_t count, std::size_t longest, Visit visit) {
  std::size_t begin = 0;
  do {
    const std::size_t size = std::min(longest, count - begin);
    visit(begin, size);
    begin += size;
  } while (begin < count);
}

// Every rank sends to every rank at once: the owner of a part receives it from everyone, combines
// it by the tree, and sends the result to everyone.
namespace direct {

// How the owners distribute the finished parts.
enum class Gather { everyone, around_the_ring };

void all_reduce(Transport& transport, const Reduction& reduction, Bytes data, Gather gather);
void reduce_scatter(Transport& transport, const Reduction& reduction, Bytes output,
                    std::span<const ConstBytes> inputs);
void all_gather(Transport& transport, std::span<const Bytes> outputs, ConstBytes input);
void all_gather_ring(Transport& transport, std::span<const Bytes> outputs, ConstBytes input);
void all_to_all(Transport& transport, std::span<const Bytes> outputs,
                std::span<const ConstBytes> inputs);
void broadcast(Transport& transport, Bytes data, int root);

}  // namespace direct

// Partial results go up the reduction tree to rank 0, and the result comes down.
namespace tree {

void all_reduce(Transport& transport, const Reduction& reduction, Bytes data);
void broadcast(Transport& transport, Bytes data, int root);

}  // namespace tree

// Recursive halving, then doubling: partners at distance 1, 2, 4, … swap halves of what they hold.
// The ranks, of any number, form blocks of powers of two, largest first, and smaller blocks add
// into larger ones, which is exactly the reduction tree.
namespace halving_doubling {

void all_reduce(Transport& transport, const Reduction& reduction, Bytes data);

}  // namespace halving_doubling

// Inside each host first, then across: bytes cross the slow network once for each host instead of
// once for each rank. A host combines only whole nodes of the reduction tree and passes those on,
// so the order stays the same however the ranks are spread.
namespace hierarchical {

void all_reduce(Transport& transport, const Reduction& reduction, Bytes data);
void reduce_scatter(Transport& transport, const Reduction& reduction, Bytes output,
                    std::span<const ConstBytes> inputs);
void all_gather(Transport& transport, std::span<const Bytes> outputs, ConstBytes input);
void broadcast(Transport& transport, Bytes data, int root);

}  // namespace hierarchical

}  // namespace lockstep::comm
