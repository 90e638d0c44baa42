#include <lockstep/comm/algorithms/algorithms.h>

#include <algorithm>
#include <cstring>

namespace lockstep::comm::tree {

namespace {

// A rank's neighbours in the binomial tree over [0, n). This is the reduction tree, in which each
// node is represented by its first rank.
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

  // Partial results of all elements. Sums in the data's own type could stay in place, but peers may
  // still be reading it.
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

  // Empty messages go up: no rank returns before its subtree has entered this call.
  if (around.parent >= 0) transport.post_send(actual(around.parent), {});
  std::size_t at = 0;
  do {
    const Bytes block = data.subspan(at, std::min(kBroadcastBlock, data.size() - at));
    if (around.parent >= 0) {
      transport.post_receive(actual(around.parent), block);
      transport.wait_received(actual(around.parent));
    }
    // The farthest child comes first, because it has the largest subtree to serve.
    for (auto child = around.children.rbegin(); child != around.children.rend(); ++child)
      transport.post_send(actual(*child), block);
    at += block.size();
  } while (at < data.size());
  for (const int child : around.children) transport.post_receive(actual(child), {});
  transport.end();
}

}  // namespace lockstep::comm::tree

namespace lockstep::comm::halving_doubling {

namespace {

// Elements [begin, end).
struct Region {
  std::size_t begin;
  std::size_t end;

  std::size_t size() const { return end - begin; }
  std::size_t middle() const { return begin + size() / 2; }
  Region lower_half() const { return {begin, middle()}; }
  Region upper_half() const { return {middle(), end}; }
};

// Whether a rank keeps the upper half when it swaps with the partner at this distance.
bool keeps_upper(int index, int distance) { return (index & distance) != 0; }
Region kept(Region region, int index, int distance) {
  return keeps_upper(index, distance) ? region.upper_half() : region.lower_half();
}
Region given(Region region, int index, int distance) {
  return keeps_upper(index, distance) ? region.lower_half() : region.upper_half();
}

// 2^levels consecutive ranks, beginning with `first`.
struct Block {
  int first = 0;
  int size = 0;
};

std::vector<Block> blocks_of(int n) {
  std::vector<Block> blocks;
  int first = 0;
  for (int size = 1 << 30; size > 0; size /= 2) {
    if ((n & size) == 0) continue;
    blocks.push_back({first, size});
    first += size;
  }
  return blocks;
}

// The region that a rank holds after it has swapped halves with all partners in its block.
Region final_region(std::size_t count, int index, int block_size) {
  Region region{0, count};
  for (int distance = 1; distance < block_size; distance *= 2)
    region = kept(region, index, distance);
  return region;
}

class AllReduce {
 public:
  AllReduce(Transport& transport, const Reduction& reduction, Bytes data)
      : transport_(transport),
        reduction_(reduction),
        data_(data),
        element_(reduction.element_bytes()),
        wide_(reduction.accumulator_bytes()),
        count_(data.size() / element_),
        partial_(transport.scratch(count_ * wide_)),
        blocks_(blocks_of(transport.size())) {
    while (transport.rank() >= blocks_[mine_].first + blocks_[mine_].size) ++mine_;
    index_ = transport.rank() - blocks_[mine_].first;
  }

  void run() {
    widen(reduction_, data_.data(), partial_.data(), count_);
    halve();
    const Region region = final_region(count_, index_, block().size);
    if (mine_ + 1 < blocks_.size()) take_smaller_block(region);
    if (mine_ > 0) {
      swap_with_larger_block();
    } else {
      finish(reduction_, partial_.data() + region.begin * wide_,
             data_.data() + region.begin * element_, region.size());
    }
    if (mine_ + 1 < blocks_.size()) return_to_smaller_block(region);
    double_back();
    transport_.end();
  }

 private:
  const Block& block() const { return blocks_[mine_]; }

  // Sends part of the partial results in pieces that the other side can view.
  void send_partial(int peer, Region region) {
    for_viewable(region, [&](std::byte* ours, std::size_t count) {
      transport_.post_send(peer, {ours, count * wide_});
    });
  }

  // Adds a peer's partial results to ours, those of lower ranks on the left.
  void add_partial(int peer, Region region) {
    const bool peer_first = peer < transport_.rank();
    for_viewable(region, [&](std::byte* ours, std::size_t count) {
      const std::byte* theirs = transport_.view(peer, count * wide_).data;
      combine(reduction_, peer_first ? theirs : ours, peer_first ? ours : theirs, ours, count);
      transport_.release(peer);
    });
  }

  template <typename Visit>
  void for_viewable(Region region, Visit visit) {
    for_pieces(region.size(), transport_.longest_view() / wide_,
               [&](std::size_t at, std::size_t count) {
                 visit(partial_.data() + (region.begin + at) * wide_, count);
               });
  }

  Bytes result(Region region) const {
    return data_.subspan(region.begin * element_, region.size() * element_);
  }

  void halve() {
    Region region{0, count_};
    for (int distance = 1; distance < block().size; distance *= 2) {
      const int partner = block().first + (index_ ^ distance);
      send_partial(partner, given(region, index_, distance));
      region = kept(region, index_, distance);
      add_partial(partner, region);
    }
  }

  // Ranks of the next smaller block hold larger regions: each region of ours lies in one of theirs.
  int smaller_partner() const {
    const Block& smaller = blocks_[mine_ + 1];
    return smaller.first + index_ % smaller.size;
  }
  std::vector<int> larger_partners() const {
    std::vector<int> partners;
    if (mine_ == 0) return partners;
    const Block& larger = blocks_[mine_ - 1];
    for (int i = index_; i < larger.size; i += block().size) partners.push_back(larger.first + i);
    return partners;
  }
  Region region_of(int peer, const Block& of) const {
    return final_region(count_, peer - of.first, of.size);
  }

  void take_smaller_block(Region region) { add_partial(smaller_partner(), region); }

  // Sends our partial results to a rank of the next larger block and receives the finished ones.
  void swap_with_larger_block() {
    const auto partners = larger_partners();
    for (const int peer : partners) {
      const Region theirs = region_of(peer, blocks_[mine_ - 1]);
      send_partial(peer, theirs);
      transport_.post_receive(peer, result(theirs));
    }
    for (const int peer : partners) transport_.wait_received(peer);
  }

  void return_to_smaller_block(Region region) {
    transport_.post_send(smaller_partner(), result(region));
  }

  void double_back() {
    for (int distance = block().size / 2; distance > 0; distance /= 2) {
      const int partner = block().first + (index_ ^ distance);
      const Region ours = held_after(distance * 2);
      const Region theirs = given(held_after(distance), index_, distance);
      transport_.post_send(partner, result(ours));
      transport_.post_receive(partner, result(theirs));
      transport_.wait_received(partner);
    }
  }

  // The region that this rank holds after halving with partners at distances below `distance`.
  Region held_after(int distance) const {
    return final_region(count_, index_, std::min(distance, block().size));
  }

  Transport& transport_;
  const Reduction& reduction_;
  Bytes data_;
  std::size_t element_;
  std::size_t wide_;
  std::size_t count_;
  Bytes partial_;
  std::vector<Block> blocks_;
  std::size_t mine_ = 0;  // the block that this rank is in
  int index_ = 0;         // this rank's place in that block
};

}  // namespace

void all_reduce(Transport& transport, const Reduction& reduction, Bytes data) {
  AllReduce(transport, reduction, data).run();
}

}  // namespace lockstep::comm::halving_doubling
