#include <lockstep/comm/algorithms/algorithms.h>

#include <algorithm>
#include <cstring>

namespace lockstep::comm::hierarchical {

namespace {

// The ranks of each host, and the partial results that each host can combine alone.
struct Hosts {
  explicit Hosts(const Transport& transport);

  int own = 0;                          // this rank's host
  std::vector<std::vector<int>> ranks;  // ranks of each host, ascending
  // the nodes of the tree that each host can combine alone
  std::vector<std::vector<TreeNode>> partials;

  std::size_t count() const { return ranks.size(); }
  const std::vector<int>& local() const { return ranks[static_cast<std::size_t>(own)]; }
  std::size_t local_index() const { return local_index_; }
  // The number of ranks on the host with the fewest.
  std::size_t fewest() const;

  // Combines the values of this host's ranks in one range of elements (`values`, in the order of
  // local()) into the host's partial results, each `stride` bytes after the one before.
  void combine_local(const Reduction& reduction, const std::vector<const std::byte*>& values,
                     std::byte* out, std::size_t stride, std::size_t count) const;

  // Returns all hosts' partial results as operands of the whole tree; parts[h] holds those of host
  // h, one after the other.
  std::vector<Operand> operands(const Reduction& reduction,
                                const std::vector<const std::byte*>& parts,
                                std::size_t count) const;

 private:
  std::size_t local_index_ = 0;
};

Hosts::Hosts(const Transport& transport) {
  const Topology& topology = transport.topology();
  own = topology.host_of[static_cast<std::size_t>(transport.rank())];
  for (int host = 0; host < topology.num_hosts(); ++host) {
    ranks.push_back(topology.ranks_on(host));
    partials.push_back(largest_nodes_within(transport.size(), [&](int rank) {
      return topology.host_of[static_cast<std::size_t>(rank)] == host;
    }));
  }
  const auto& here = local();
  local_index_ = static_cast<std::size_t>(std::find(here.begin(), here.end(), transport.rank()) -
                                          here.begin());
}

std::size_t Hosts::fewest() const {
  std::size_t least = ranks.front().size();
  for (const auto& here : ranks) least = std::min(least, here.size());
  return least;
}

void Hosts::combine_local(const Reduction& reduction, const std::vector<const std::byte*>& values,
                          std::byte* out, std::size_t stride, std::size_t count) const {
  std::size_t next = 0;
  for (const TreeNode& node : partials[static_cast<std::size_t>(own)]) {
    // The nodes tile this host's ranks in order, so their ranks are consecutive in local().
    std::vector<Operand> operands;
    for (int i = 0; i < node.count; ++i)
      operands.push_back({{node.first + i, 1}, values[next++], false});
    reduce_to_partial(reduction, node, operands, out, count);
    out += stride;
  }
}

std::vector<Operand> Hosts::operands(const Reduction& reduction,
                                     const std::vector<const std::byte*>& parts,
                                     std::size_t count) const {
  std::vector<Operand> all;
  for (std::size_t host = 0; host < ranks.size(); ++host)
    for (std::size_t i = 0; i < partials[host].size(); ++i)
      all.push_back(
          {partials[host][i], parts[host] + i * count * reduction.accumulator_bytes(), true});
  std::sort(all.begin(), all.end(),
            [](const Operand& a, const Operand& b) { return a.node.first < b.node.first; });
  return all;
}

// Bytes of elements that one chunk has: large enough to fill a network, small enough for scratch
// memory.
constexpr std::size_t kChunkBytes = 8u << 20;

// Receives the values of this host's other ranks, in pieces that sender and receiver cut alike,
// combines them with `mine`, and returns this host's partial results one after the other.
Bytes combine_own_host(Transport& transport, const Hosts& hosts, const Reduction& reduction,
                       ConstBytes mine) {
  const std::size_t element = reduction.element_bytes();
  const std::size_t wide = reduction.accumulator_bytes();
  const std::size_t stride = mine.size() / element * wide;
  const Bytes partials = transport.scratch(stride * hosts.partials[index(hosts.own)].size());
  for_pieces(
      mine.size() / element, transport.longest_view() / element,
      [&](std::size_t begin, std::size_t count) {
        std::vector<const std::byte*> values;
        for (const int rank : hosts.local())
          values.push_back(rank == transport.rank() ? mine.data() + begin * element
                                                    : transport.view(rank, count * element).data);
        hosts.combine_local(reduction, values, partials.data() + begin * wide, stride, count);
        for (const int rank : hosts.local())
          if (rank != transport.rank()) transport.release(rank);
      });
  return partials;
}

// Sends this rank's values to the rank of this host that combines them in combine_own_host().
void send_to_combiner(Transport& transport, const Reduction& reduction, int combiner,
                      ConstBytes values) {
  const std::size_t element = reduction.element_bytes();
  for_pieces(values.size() / element, transport.longest_view() / element,
             [&](std::size_t begin, std::size_t count) {
               transport.post_send(combiner, values.subspan(begin * element, count * element));
             });
}

// An all-reduce of one chunk. The elements are cut into lanes, one for each rank of the smallest
// host. On every host the rank with the lane's index serves that lane, and every host finishes its
// share of each lane.
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
      split_by_host();
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
  // The share of this rank's lane that host h finishes.
  Part share(std::size_t host) const {
    return part_of(lane(hosts_.local_index()).size() / element_, hosts_.count(), host);
  }
  int lane_server(std::size_t host) const { return hosts_.ranks[host][hosts_.local_index()]; }

  void contribute() {
    for (std::size_t which = 0; which < lanes_; ++which)
      if (which != hosts_.local_index())
        send_to_combiner(transport_, reduction_, hosts_.local()[which], lane(which));
  }

  // Cuts this host's partial results into the share that each host finishes.
  void split_by_host() {
    const Bytes mine = lane(hosts_.local_index());
    const std::size_t wide = reduction_.accumulator_bytes();
    const std::size_t num_partials = hosts_.partials[index(hosts_.own)].size();
    const std::size_t stride = mine.size() / element_ * wide;
    const Bytes whole = combine_own_host(transport_, hosts_, reduction_, mine);
    own_.resize(hosts_.count());
    for (std::size_t host = 0; host < hosts_.count(); ++host) {
      const Part part = share(host);
      own_[host] = transport_.scratch(part.count * wide * num_partials);
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
      theirs_[host] = transport_.scratch(part.count * reduction_.accumulator_bytes() *
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
  std::vector<Bytes> own_;     // this host's partials of each host's share
  std::vector<Bytes> theirs_;  // other hosts' partials of our share
};

// The rank of `host` that passes messages on from or to a rank of another host.
int deputy_for(const Hosts& hosts, std::size_t host, int rank) {
  const auto& here = hosts.ranks[host];
  return here[index(rank) % here.size()];
}

}  // namespace

void all_reduce(Transport& transport, const Reduction& reduction, Bytes data) {
  const Hosts hosts(transport);
  const std::size_t element = reduction.element_bytes();
  for_pieces(data.size() / element, kChunkBytes / element,
             [&](std::size_t begin, std::size_t count) {
               const Bytes chunk = data.subspan(begin * element, count * element);
               AllReduceChunk(transport, hosts, reduction, chunk).run();
             });
}

// For every rank on another host, this host's deputy combines the inputs that the host's ranks have
// for it and sends the result; ranks of the same host send directly.
void reduce_scatter(Transport& transport, const Reduction& reduction, Bytes output,
                    std::span<const ConstBytes> inputs) {
  const Hosts hosts(transport);
  const int self = transport.rank();
  const std::size_t element = reduction.element_bytes();
  const std::size_t wide = reduction.accumulator_bytes();
  const auto host_of = [&](int rank) { return index(transport.topology().host_of[index(rank)]); };
  const auto own_host = index(hosts.own);
  const auto combiner_of = [&](int rank) {
    return host_of(rank) == own_host ? rank : deputy_for(hosts, own_host, rank);
  };

  for (int rank = 0; rank < transport.size(); ++rank)
    if (combiner_of(rank) != self)
      send_to_combiner(transport, reduction, combiner_of(rank), inputs[index(rank)]);
  // Partial results for each rank that this rank combines for, itself included.
  std::vector<Bytes> combined(index(transport.size()));
  for (int rank = 0; rank < transport.size(); ++rank) {
    if (combiner_of(rank) != self) continue;
    Bytes& partials = combined[index(rank)];
    partials = combine_own_host(transport, hosts, reduction, inputs[index(rank)]);
    if (rank != self) transport.post_send(rank, partials);
  }
  const std::size_t count = output.size() / element;
  std::vector<const std::byte*> parts(hosts.count());
  for (std::size_t host = 0; host < hosts.count(); ++host) {
    parts[host] = combined[index(self)].data();
    if (host == own_host) continue;
    const Bytes theirs = transport.scratch(count * wide * hosts.partials[host].size());
    transport.post_receive(deputy_for(hosts, host, self), theirs);
    parts[host] = theirs.data();
  }
  for (std::size_t host = 0; host < hosts.count(); ++host)
    if (host != own_host) transport.wait_received(deputy_for(hosts, host, self));
  std::byte* result = output.data();
  reduce_to_result(reduction, transport.size(), hosts.operands(reduction, parts, count),
                   std::span(&result, 1), count);
  transport.end();
}

// A rank sends to every rank of its host and to its deputy on each other host, which passes the
// data on.
void all_gather(Transport& transport, std::span<const Bytes> outputs, ConstBytes input) {
  const Hosts hosts(transport);
  const int self = transport.rank();
  const auto own_host = index(hosts.own);
  const auto host_of = [&](int rank) { return index(transport.topology().host_of[index(rank)]); };

  const Bytes own = outputs[index(self)];
  copy_own(own, input);
  for (std::size_t host = 0; host < hosts.count(); ++host)
    if (host != own_host) transport.post_send(deputy_for(hosts, host, self), own);
  for (const int rank : hosts.local())
    if (rank != self) transport.post_send(rank, own);

  // Receive from this host's ranks, and from other hosts the parts that this rank passes on.
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
      own_host == root_host ? root : deputy_for(hosts, own_host, root);  // on this host
  std::vector<int> served;
  if (self == root)
    for (std::size_t host = 0; host < hosts.count(); ++host)
      if (host != root_host) served.push_back(deputy_for(hosts, host, root));
  if (self == source)
    for (const int rank : hosts.local())
      if (rank != self) served.push_back(rank);
  const int from = self == root ? -1 : self == source ? root : source;

  // Empty messages travel towards the root: no rank returns before the ranks that it serves have
  // entered this call.
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
