#include <lockstep/comm/algorithms/algorithms.h>

#include <algorithm>
#include <cstring>

namespace lockstep::comm::direct {

namespace {

// Up to this size every rank sends all of its data to every other rank and combines everything
// itself: one round instead of two.
constexpr std::size_t kOneRoundBytes = 16u << 10;

// Visits the other ranks, starting with the next one, so that not all ranks send to the same one
// first.
template <typename Visit>
void for_each_peer(const Transport& transport, Visit visit) {
  for (int shift = 1; shift < transport.size(); ++shift)
    visit((transport.rank() + shift) % transport.size());
}

// Waits for `count` elements from every rank, combines them with ours, and writes the result into
// the messages that are exchanges, which answers their senders.
void combine_views(Transport& transport, const Reduction& reduction, const std::byte* mine,
                   std::byte* destination, std::size_t count) {
  const int n = transport.size();
  std::vector<Operand> operands(index(n));
  std::vector<std::byte*> destinations = {destination};
  for (int rank = 0; rank < n; ++rank) {
    operands[index(rank)] = {{rank, 1}, mine, false};
    if (rank == transport.rank()) continue;
    const View view = transport.view(rank, count * reduction.element_bytes());
    operands[index(rank)].data = view.data;
    if (view.answer != nullptr) destinations.push_back(view.answer);
  }
  reduce_to_result(reduction, n, operands, destinations, count);
  for_each_peer(transport, [&](int peer) { transport.release(peer); });
}

// The result goes to scratch memory first: until end() a message may still have to be sent from
// `data`, because a peer is slow to take it or a connection broke.
void all_reduce_one_round(Transport& transport, const Reduction& reduction, Bytes data) {
  const Bytes result = transport.scratch(data.size());
  for_each_peer(transport, [&](int peer) { transport.post_send(peer, data); });
  combine_views(transport, reduction, data.data(), result.data(),
                data.size() / reduction.element_bytes());
  transport.end();
  if (!data.empty()) std::memcpy(data.data(), result.data(), data.size());
}

// Each rank's part of an all-reduce is cut into blocks, so that blocks of one round travel while
// those of the other are added.
struct Blocks {
  std::size_t element_bytes;
  std::size_t count;  // elements in all
  std::size_t ranks;
  std::size_t block;  // most elements in a block

  // At least one block, so that even an empty call carries its fingerprint to everyone.
  std::size_t number() const {
    return std::max<std::size_t>(((count + ranks - 1) / ranks + block - 1) / block, 1);
  }

  // Block k of the part that `owner` combines.
  Part at(std::size_t owner, std::size_t k) const {
    const Part part = part_of(count, ranks, owner);
    const std::size_t begin = std::min(k * block, part.count);
    return {part.begin + begin, std::min(block, part.count - begin)};
  }

  Bytes in(Bytes data, std::size_t owner, std::size_t k) const {
    const Part part = at(owner, k);
    return data.subspan(part.begin * element_bytes, part.count * element_bytes);
  }
};

// Parts of any length are worked through in blocks side by side. Block 0 of a part is sent even if
// it is empty, because it carries the fingerprint.
template <typename Byte>
bool has_block(std::span<Byte> part, std::size_t k, std::size_t block) {
  return k == 0 || k * block < part.size();
}

template <typename Byte>
std::span<Byte> block_of(std::span<Byte> part, std::size_t k, std::size_t block) {
  return part.subspan(k * block, std::min(block, part.size() - k * block));
}

template <typename Parts>
std::size_t blocks_of(const Parts& parts, std::size_t block) {
  std::size_t longest = 0;
  for (const auto& part : parts) longest = std::max(longest, part.size());
  return std::max<std::size_t>((longest + block - 1) / block, 1);
}

}  // namespace

void all_reduce(Transport& transport, const Reduction& reduction, Bytes data, Gather gather) {
  if (transport.size() == 1) {
    // The sum, minimum or maximum over one rank is that rank's data.
    if (reduction.divisor != 1)
      combine_views(transport, reduction, data.data(), data.data(),
                    data.size() / reduction.element_bytes());
    return;
  }
  if (data.size() <= std::min(kOneRoundBytes, transport.longest_view()) &&
      gather == Gather::everyone)
    return all_reduce_one_round(transport, reduction, data);

  const std::size_t self = index(transport.rank());
  const std::size_t element = reduction.element_bytes();
  const Blocks blocks{element, data.size() / element, index(transport.size()),
                      transport.longest_view() / element};
  const std::size_t num_blocks = blocks.number();

  // A peer that can answer in place does so. The other peers get the result as a message of its
  // own: between two ranks travel part 0, part 1, result 0, part 2, result 1, …
  const bool everyone = gather == Gather::everyone;
  const auto contribute = [&](std::size_t k) {
    for_each_peer(transport, [&](int peer) {
      const Bytes part = blocks.in(data, index(peer), k);
      if (everyone && transport.can_exchange(peer)) return transport.post_exchange(peer, part);
      transport.post_send(peer, part);
    });
  };
  const auto collect = [&](std::size_t k) {
    for_each_peer(transport, [&](int peer) {
      if (!transport.can_exchange(peer))
        transport.post_receive(peer, blocks.in(data, index(peer), k));
    });
  };

  contribute(0);
  for (std::size_t k = 0; k < num_blocks; ++k) {
    if (k + 1 < num_blocks) contribute(k + 1);
    const Bytes mine = blocks.in(data, self, k);
    combine_views(transport, reduction, mine.data(), mine.data(), mine.size() / element);
    if (!everyone) continue;
    for_each_peer(transport, [&](int peer) {
      if (!transport.can_exchange(peer)) transport.post_send(peer, mine);
    });
    if (k > 0) collect(k - 1);
  }
  if (everyone) {
    collect(num_blocks - 1);
    return transport.end();
  }
  std::vector<Bytes> parts;
  for (std::size_t owner = 0; owner < blocks.ranks; ++owner) {
    const Part part = part_of(blocks.count, blocks.ranks, owner);
    parts.push_back(data.subspan(part.begin * element, part.count * element));
  }
  all_gather_ring(transport, parts, parts[self]);
}

void reduce_scatter(Transport& transport, const Reduction& reduction, Bytes output,
                    std::span<const ConstBytes> inputs) {
  const ConstBytes mine = inputs[index(transport.rank())];
  const std::size_t element = reduction.element_bytes();
  const std::size_t block = transport.longest_view() / element * element;
  const std::size_t num_blocks = blocks_of(inputs, block);
  const auto contribute = [&](std::size_t k) {
    for_each_peer(transport, [&](int peer) {
      const ConstBytes part = inputs[index(peer)];
      if (has_block(part, k, block)) transport.post_send(peer, block_of(part, k, block));
    });
  };
  contribute(0);
  for (std::size_t k = 0; k < num_blocks; ++k) {
    if (k + 1 < num_blocks) contribute(k + 1);
    if (!has_block(mine, k, block)) continue;
    combine_views(transport, reduction, mine.data() + k * block, output.data() + k * block,
                  block_of(mine, k, block).size() / element);
  }
  transport.end();
}

// Works in blocks, so that bytes that have just been read for the peers are still in the cache when
// they are copied to our own output.
void all_gather(Transport& transport, std::span<const Bytes> outputs, ConstBytes input) {
  const Bytes own = outputs[index(transport.rank())];
  const std::size_t block = transport.longest_view();
  const std::size_t num_blocks = blocks_of(outputs, block);
  for (std::size_t k = 0; k < num_blocks; ++k) {
    if (has_block(input, k, block)) {
      const ConstBytes mine = block_of(input, k, block);
      for_each_peer(transport, [&](int peer) { transport.post_send(peer, mine); });
      copy_own(own.subspan(k * block, mine.size()), mine);
    }
    for_each_peer(transport, [&](int peer) {
      const Bytes theirs = outputs[index(peer)];
      if (has_block(theirs, k, block)) transport.post_receive(peer, block_of(theirs, k, block));
    });
  }
  transport.end();
}

void all_gather_ring(Transport& transport, std::span<const Bytes> outputs, ConstBytes input) {
  const int n = transport.size();
  const int self = transport.rank();
  const int next = (self + 1) % n;
  const int previous = (self + n - 1) % n;
  const Bytes own = outputs[index(self)];
  copy_own(own, input);
  transport.post_send(next, own);
  for (int step = 1; step < n; ++step) {
    const Bytes arriving = outputs[index((self + n - step) % n)];
    transport.post_receive(previous, arriving);
    transport.wait_received(previous);
    if (step + 1 < n) transport.post_send(next, arriving);
  }
  transport.end();
}

void all_to_all(Transport& transport, std::span<const Bytes> outputs,
                std::span<const ConstBytes> inputs) {
  for_each_peer(transport, [&](int peer) { transport.post_send(peer, inputs[index(peer)]); });
  const std::size_t self = index(transport.rank());
  copy_own(outputs[self], inputs[self]);
  for_each_peer(transport, [&](int peer) { transport.post_receive(peer, outputs[index(peer)]); });
  transport.end();
}

void broadcast(Transport& transport, Bytes data, int root) {
  // Sends an empty message to the root, which must not return before it knows that all ranks are in
  // this call.
  if (transport.rank() == root) {
    for_each_peer(transport, [&](int peer) { transport.post_send(peer, data); });
    for_each_peer(transport, [&](int peer) { transport.post_receive(peer, {}); });
  } else {
    transport.post_send(root, {});
    transport.post_receive(root, data);
  }
  transport.end();
}

}  // namespace lockstep::comm::direct
