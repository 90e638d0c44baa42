#include <lockstep/comm/algorithms/tree.h>

#include <algorithm>
#include <cstring>

namespace lockstep::comm::tree {

namespace {

// A rank's neighbours in the binomial tree over [0, n), which is the reduction tree seen from its
// nodes' first ranks.
struct Neighbours {
  int parent = -1;
  std::vector<int> children;  // nearest first: the order in which they are combined

  Neighbours(int rank, int n) {
    for (int distance = 1; distance < n; distance *= 2) {
      if ((rank & distance) != 0) {
        parent = rank - distance;
        break;
      }
      if (rank + distance < n) children.push_back(rank + distance);
    }
  }
};

constexpr std::size_t kBroadcastBlock = 256u << 10;

}  // namespace

void all_reduce(Transport& transport, const Reduction& reduction, Bytes data) {
  const Neighbours around(transport.rank(), transport.size());
  const std::size_t element = reduction.element_bytes();
  const std::size_t wide = reduction.accumulator_bytes();
  const std::size_t count = data.size() / element;
  const std::size_t block = transport.longest_view() / wide;

  // Partial results of the whole; sums in the data's own type could stay in place, but peers may
  // be reading it.
  const Bytes partial = transport.scratch(count * wide);
  widen(reduction, data.data(), partial.data(), count);
  std::size_t at = 0;
  do {
    const std::size_t size = std::min(block, count - at);
    std::byte* mine = partial.data() + at * wide;
    for (const int child : around.children) {
      const std::byte* theirs = transport.view(child, size * wide).data;
      combine(reduction, mine, theirs, mine, size);
      transport.release(child);
    }
    if (around.parent >= 0) {
      transport.post_send(around.parent, {mine, size * wide});
    } else {
      const Bytes result = data.subspan(at * element, size * element);
      finish(reduction, mine, result.data(), size);
      for (const int child : around.children) transport.post_send(child, result);
    }
    at += size;
  } while (at < count);

  if (around.parent >= 0) {
    at = 0;
    do {
      const std::size_t size = std::min(block, count - at);
      const Bytes result = data.subspan(at * element, size * element);
      transport.post_receive(around.parent, result);
      transport.wait_received(around.parent);
      for (const int child : around.children) transport.post_send(child, result);
      at += size;
    } while (at < count);
  }
  transport.end();
}

void broadcast(Transport& transport, Bytes data, int root) {
  const int n = transport.size();
  const auto actual = [&](int virtual_rank) { return (virtual_rank + root) % n; };
  const Neighbours around((transport.rank() - root + n) % n, n);

  // Empty messages upward: no rank goes on before its subtree has entered this call.
  if (around.parent >= 0) transport.post_send(actual(around.parent), {});
  std::size_t at = 0;
  do {
    const Bytes block = data.subspan(at, std::min(kBroadcastBlock, data.size() - at));
    if (around.parent >= 0) {
      transport.post_receive(actual(around.parent), block);
      transport.wait_received(actual(around.parent));
    }
    // Farthest first: it has the largest subtree to serve.
    for (auto child = around.children.rbegin(); child != around.children.rend(); ++child)
      transport.post_send(actual(*child), block);
    at += block.size();
  } while (at < data.size());
  for (const int child : around.children) transport.post_receive(actual(child), {});
  transport.end();
}

}  // namespace lockstep::comm::tree
