#include <lockstep/comm/algorithms/hierarchical.h>

#include <algorithm>
#include <cstring>

#include <lockstep/comm/algorithms/hosts.h>
#include <lockstep/comm/algorithms/partition.h>

namespace lockstep::comm::hierarchical {

namespace {

// Elements (in bytes) taken at a time: large enough to fill a network, small enough for scratch.
constexpr std::size_t kChunkBytes = 8u << 20;

std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

// Pieces of [0, bytes) that any link can show; at least one, possibly empty.
template <typename Visit>
void for_pieces(std::size_t bytes, std::size_t longest, Visit visit) {
  std::size_t at = 0;
  do {
    const std::size_t size = std::min(longest, bytes - at);
    visit(at, size);
    at += size;
  } while (at < bytes);
}

// An all-reduce of one chunk. The elements are cut into lanes, one for each rank of the smallest
// host; on every host the rank with that index serves the lane, and of each lane every host
// finishes its share.
class AllReduceChunk {
 public:
  AllReduceChunk(Transport& transport, const Hosts& hosts, const Reduction& reduction, Bytes data)
      : transport_(transport),
        hosts_(hosts),
        reduction_(reduction),
        data_(data),
        element_(reduction.element_bytes()),
        lanes_(hosts.fewest()) {}

  void run() {
    contribute();
    if (serves_lane()) {
      combine_own_host();
      combine_across_hosts();
      share_across_hosts();
      share_in_host();
    }
    collect_lanes();
    transport_.end();
  }

 private:
  bool serves_lane() const { return hosts_.local_index() < lanes_; }

  Bytes lane(std::size_t which) const {
    const Part part = part_of(data_.size() / element_, lanes_, which);
    return data_.subspan(part.begin * element_, part.count * element_);
  }
  // Host h's share of this rank's lane.
  Part share(std::size_t host) const {
    return part_of(lane(hosts_.local_index()).size() / element_, hosts_.count(), host);
  }
  int lane_server(std::size_t host) const { return hosts_.ranks[host][hosts_.local_index()]; }

  std::size_t piece_bytes() const { return transport_.longest_view() / element_ * element_; }

  void contribute() {
    for (std::size_t which = 0; which < lanes_; ++which) {
      if (which == hosts_.local_index()) continue;
      const Bytes part = lane(which);
      for_pieces(part.size(), piece_bytes(), [&](std::size_t at, std::size_t size) {
        transport_.post_send(hosts_.local()[which], part.subspan(at, size));
      });
    }
  }

  // Each host's share of the lane lies in one piece of scratch, with all of this host's partials.
  void combine_own_host() {
    const Bytes mine = lane(hosts_.local_index());
    const std::size_t wide = reduction_.accumulator_bytes();
    const std::size_t num_partials = hosts_.partials[index(hosts_.own)].size();
    std::vector<std::byte> whole(mine.size() / element_ * wide * num_partials);
    const std::size_t stride = mine.size() / element_ * wide;
    std::vector<std::byte> piece_out(piece_bytes() / element_ * wide * num_partials);
    for_pieces(mine.size(), piece_bytes(), [&](std::size_t at, std::size_t size) {
      std::vector<const std::byte*> values;
      for (const int rank : hosts_.local())
        values.push_back(rank == transport_.rank() ? mine.data() + at
                                                   : transport_.view(rank, size).data);
      const std::size_t count = size / element_;
      hosts_.combine_local(reduction_, values, piece_out.data(), count);
      for (const int rank : hosts_.local())
        if (rank != transport_.rank()) transport_.release(rank);
      for (std::size_t i = 0; i < num_partials && count > 0; ++i)
        std::memcpy(whole.data() + i * stride + at / element_ * wide,
                    piece_out.data() + i * count * wide, count * wide);
    });
    own_.resize(hosts_.count());
    for (std::size_t host = 0; host < hosts_.count(); ++host) {
      const Part part = share(host);
      own_[host].resize(part.count * wide * num_partials);
      for (std::size_t i = 0; i < num_partials && part.count > 0; ++i)
        std::memcpy(own_[host].data() + i * part.count * wide,
                    whole.data() + i * stride + part.begin * wide, part.count * wide);
    }
  }

  void combine_across_hosts() {
    const std::size_t self = index(hosts_.own);
    const Part part = share(self);
    theirs_.resize(hosts_.count());
    for (std::size_t host = 0; host < hosts_.count(); ++host) {
      if (host == self) continue;
      transport_.post_send(lane_server(host), own_[host]);
      theirs_[host].resize(part.count * reduction_.accumulator_bytes() *
                           hosts_.partials[host].size());
      transport_.post_receive(lane_server(host), theirs_[host]);
    }
    std::vector<const std::byte*> parts;
    for (std::size_t host = 0; host < hosts_.count(); ++host) {
      if (host != self) transport_.wait_received(lane_server(host));
      parts.push_back(host == self ? own_[host].data() : theirs_[host].data());
    }
    const auto operands = hosts_.operands(reduction_, parts, part.count);
    std::byte* result = lane(hosts_.local_index()).data() + part.begin * element_;
    reduce_to_result(reduction_, transport_.size(), operands, std::span(&result, 1), part.count);
  }

  void share_across_hosts() {
    const std::size_t self = index(hosts_.own);
    const Bytes mine = lane(hosts_.local_index());
    const auto bytes_of = [&](std::size_t host) {
      return mine.subspan(share(host).begin * element_, share(host).count * element_);
    };
    for (std::size_t host = 0; host < hosts_.count(); ++host) {
      if (host == self) continue;
      transport_.post_send(lane_server(host), bytes_of(self));
      transport_.post_receive(lane_server(host), bytes_of(host));
    }
    for (std::size_t host = 0; host < hosts_.count(); ++host)
      if (host != self) transport_.wait_received(lane_server(host));
  }

  void share_in_host() {
    for (const int rank : hosts_.local())
      if (rank != transport_.rank()) transport_.post_send(rank, lane(hosts_.local_index()));
  }

  void collect_lanes() {
    for (std::size_t which = 0; which < lanes_; ++which)
      if (which != hosts_.local_index())
        transport_.post_receive(hosts_.local()[which], lane(which));
  }

  Transport& transport_;
  const Hosts& hosts_;
  const Reduction& reduction_;
  Bytes data_;
  std::size_t element_;
  std::size_t lanes_;
  std::vector<std::vector<std::byte>> own_;     // this host's partials of each host's share
  std::vector<std::vector<std::byte>> theirs_;  // other hosts' partials of our share
};

// Which rank of a host passes things on for a rank elsewhere.
int deputy_for(const Hosts& hosts, std::size_t host, int rank) {
  const auto& here = hosts.ranks[host];
  return here[index(rank) % here.size()];
}

}  // namespace

void all_reduce(Transport& transport, const Reduction& reduction, Bytes data) {
  const Hosts hosts(transport);
  const std::size_t chunk = kChunkBytes / reduction.element_bytes() * reduction.element_bytes();
  for_pieces(data.size(), chunk, [&](std::size_t at, std::size_t size) {
    AllReduceChunk(transport, hosts, reduction, data.subspan(at, size)).run();
  });
}

// For every rank on another host, this host's deputy for it combines what the host's ranks have for
// it and sends that; ranks of the same host send directly.
void reduce_scatter(Transport& transport, const Reduction& reduction, Bytes output,
                    std::span<const ConstBytes> inputs) {
  const Hosts hosts(transport);
  const int self = transport.rank();
  const std::size_t element = reduction.element_bytes();
  const std::size_t wide = reduction.accumulator_bytes();
  const std::size_t piece = transport.longest_view() / element * element;
  const auto host_of = [&](int rank) { return index(transport.topology().host_of[index(rank)]); };
  const auto own_host = index(hosts.own);
  const auto combiner_of = [&](int rank) {
    return host_of(rank) == own_host ? rank : deputy_for(hosts, own_host, rank);
  };

  for (int rank = 0; rank < transport.size(); ++rank) {
    if (combiner_of(rank) == self) continue;
    for_pieces(inputs[index(rank)].size(), piece, [&](std::size_t at, std::size_t size) {
      transport.post_send(combiner_of(rank), inputs[index(rank)].subspan(at, size));
    });
  }
  // Partials for each rank this one combines for, itself included.
  std::vector<std::vector<std::byte>> combined(index(transport.size()));
  const std::size_t num_partials = hosts.partials[own_host].size();
  for (int rank = 0; rank < transport.size(); ++rank) {
    if (combiner_of(rank) != self) continue;
    const ConstBytes mine = inputs[index(rank)];
    auto& out = combined[index(rank)];
    const std::size_t stride = mine.size() / element * wide;
    out.resize(stride * num_partials);
    std::vector<std::byte> piece_out(piece / element * wide * num_partials);
    for_pieces(mine.size(), piece, [&](std::size_t at, std::size_t size) {
      std::vector<const std::byte*> values;
      for (const int local : hosts.local())
        values.push_back(local == self ? mine.data() + at : transport.view(local, size).data);
      const std::size_t count = size / element;
      hosts.combine_local(reduction, values, piece_out.data(), count);
      for (const int local : hosts.local())
        if (local != self) transport.release(local);
      for (std::size_t i = 0; i < num_partials && count > 0; ++i)
        std::memcpy(out.data() + i * stride + at / element * wide,
                    piece_out.data() + i * count * wide, count * wide);
    });
    if (rank != self) transport.post_send(rank, out);
  }
  const std::size_t count = output.size() / element;
  std::vector<std::vector<std::byte>> received(hosts.count());
  std::vector<const std::byte*> parts(hosts.count());
  for (std::size_t host = 0; host < hosts.count(); ++host) {
    parts[host] = combined[index(self)].data();
    if (host == own_host) continue;
    received[host].resize(count * wide * hosts.partials[host].size());
    transport.post_receive(deputy_for(hosts, host, self), received[host]);
    parts[host] = received[host].data();
  }
  for (std::size_t host = 0; host < hosts.count(); ++host)
    if (host != own_host) transport.wait_received(deputy_for(hosts, host, self));
  std::byte* result = output.data();
  reduce_to_result(reduction, transport.size(), hosts.operands(reduction, parts, count),
                   std::span(&result, 1), count);
  transport.end();
}

// A rank sends to everyone on its host and to its deputy on each other host, who passes it on.
void all_gather(Transport& transport, std::span<const Bytes> outputs, ConstBytes input) {
  const Hosts hosts(transport);
  const int self = transport.rank();
  const auto own_host = index(hosts.own);
  const auto host_of = [&](int rank) { return index(transport.topology().host_of[index(rank)]); };

  const Bytes own = outputs[index(self)];
  if (own.data() != input.data() && !input.empty())
    std::memcpy(own.data(), input.data(), input.size());
  for (std::size_t host = 0; host < hosts.count(); ++host)
    if (host != own_host) transport.post_send(deputy_for(hosts, host, self), own);
  for (const int rank : hosts.local())
    if (rank != self) transport.post_send(rank, own);

  // What comes from this host's ranks themselves, and from elsewhere for us to pass on.
  for (const int rank : hosts.local())
    if (rank != self) transport.post_receive(rank, outputs[index(rank)]);
  for (int rank = 0; rank < transport.size(); ++rank)
    if (host_of(rank) != own_host && deputy_for(hosts, own_host, rank) == self)
      transport.post_receive(rank, outputs[index(rank)]);
  for (int rank = 0; rank < transport.size(); ++rank) {
    if (host_of(rank) == own_host) continue;
    const int deputy = deputy_for(hosts, own_host, rank);
    if (deputy != self) {
      transport.post_receive(deputy, outputs[index(rank)]);
      continue;
    }
    transport.wait_received(rank);
    for (const int local : hosts.local())
      if (local != self) transport.post_send(local, outputs[index(rank)]);
  }
  transport.end();
}

void broadcast(Transport& transport, Bytes data, int root) {
  const Hosts hosts(transport);
  const int self = transport.rank();
  const auto own_host = index(hosts.own);
  const auto root_host = index(transport.topology().host_of[index(root)]);
  const int source =
      own_host == root_host ? root : deputy_for(hosts, own_host, root);  // of this host
  std::vector<int> served;
  if (self == root)
    for (std::size_t host = 0; host < hosts.count(); ++host)
      if (host != root_host) served.push_back(deputy_for(hosts, host, root));
  if (self == source)
    for (const int rank : hosts.local())
      if (rank != self) served.push_back(rank);
  const int from = self == root ? -1 : self == source ? root : source;

  // Empty messages upward: no rank goes on before those it serves have entered this call.
  if (from >= 0) transport.post_send(from, {});
  for_pieces(data.size(), 256u << 10, [&](std::size_t at, std::size_t size) {
    const Bytes piece = data.subspan(at, size);
    if (from >= 0) {
      transport.post_receive(from, piece);
      transport.wait_received(from);
    }
    for (const int rank : served) transport.post_send(rank, piece);
  });
  for (const int rank : served) transport.post_receive(rank, {});
  transport.end();
}

}  // namespace lockstep::comm::hierarchical
