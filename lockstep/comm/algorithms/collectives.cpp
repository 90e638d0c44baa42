#include <lockstep/comm/algorithms/collectives.h>

#include <array>

#include <lockstep/comm/algorithms/algorithms.h>

namespace lockstep::comm {

namespace {

constexpr std::array kAllReduce = {Algorithm::direct, Algorithm::tree, Algorithm::ring,
                                   Algorithm::halving_doubling, Algorithm::hierarchical};
constexpr std::array kReduceScatter = {Algorithm::direct, Algorithm::hierarchical};
constexpr std::array kAllGather = {Algorithm::direct, Algorithm::ring, Algorithm::hierarchical};
constexpr std::array kBroadcast = {Algorithm::direct, Algorithm::tree, Algorithm::hierarchical};
constexpr std::array kOnlyDirect = {Algorithm::direct};

// With more ranks than this, talking to all of them at once costs more than log₂ n rounds.
constexpr int kManyRanks = 16;
constexpr std::size_t kSmallBytes = 32u << 10;

Algorithm automatic(Operation operation, std::size_t bytes, const Topology& topology) {
  const int ranks = static_cast<int>(topology.host_of.size());
  const int hosts = topology.num_hosts();
  const bool several_each = hosts > 1 && hosts < ranks;
  switch (operation) {
    case Operation::all_reduce:
      if (several_each && bytes > kSmallBytes) return Algorithm::hierarchical;
      if (ranks > kManyRanks && bytes <= kSmallBytes) return Algorithm::tree;
      if (ranks > kManyRanks) return Algorithm::halving_doubling;
      return Algorithm::direct;
    case Operation::reduce_scatter:
    case Operation::all_gather:
      if (several_each) return Algorithm::hierarchical;
      if (ranks > kManyRanks && operation == Operation::all_gather) return Algorithm::ring;
      return Algorithm::direct;
    case Operation::broadcast:
      if (several_each) return Algorithm::hierarchical;
      return ranks > 4 ? Algorithm::tree : Algorithm::direct;
    default: return Algorithm::direct;
  }
}

// Every algorithm but `direct` assumes that there is another rank.
Algorithm for_size_of(const Transport& transport, Algorithm algorithm) {
  return transport.size() == 1 ? Algorithm::direct : algorithm;
}

}  // namespace

std::span<const Algorithm> algorithms_of(Operation operation) {
  switch (operation) {
    case Operation::all_reduce: return kAllReduce;
    case Operation::reduce_scatter: return kReduceScatter;
    case Operation::all_gather: return kAllGather;
    case Operation::broadcast: return kBroadcast;
    default: return kOnlyDirect;
  }
}

Algorithm choose_algorithm(Operation operation, Algorithm wanted, std::size_t bytes,
                           const Topology& topology) {
  if (wanted == Algorithm::automatic) return automatic(operation, bytes, topology);
  std::string choices = name(Algorithm::automatic);
  for (const Algorithm one : algorithms_of(operation)) {
    if (one == wanted) return wanted;
    choices += std::string(", ") + name(one);
  }
  throw UsageError("{} has no algorithm '{}': choose one of {}", name(operation), name(wanted),
                   choices);
}

void all_reduce(Transport& transport, Algorithm algorithm, const Reduction& reduction, Bytes data) {
  switch (for_size_of(transport, algorithm)) {
    case Algorithm::tree: return tree::all_reduce(transport, reduction, data);
    case Algorithm::ring:
      return direct::all_reduce(transport, reduction, data, direct::Gather::around_the_ring);
    case Algorithm::halving_doubling:
      return halving_doubling::all_reduce(transport, reduction, data);
    case Algorithm::hierarchical: return hierarchical::all_reduce(transport, reduction, data);
    default: return direct::all_reduce(transport, reduction, data, direct::Gather::everyone);
  }
}

void reduce_scatter(Transport& transport, Algorithm algorithm, const Reduction& reduction,
                    Bytes output, std::span<const ConstBytes> inputs) {
  if (for_size_of(transport, algorithm) == Algorithm::hierarchical)
    return hierarchical::reduce_scatter(transport, reduction, output, inputs);
  direct::reduce_scatter(transport, reduction, output, inputs);
}

void all_gather(Transport& transport, Algorithm algorithm, std::span<const Bytes> outputs,
                ConstBytes input) {
  switch (for_size_of(transport, algorithm)) {
    case Algorithm::ring: return direct::all_gather_ring(transport, outputs, input);
    case Algorithm::hierarchical: return hierarchical::all_gather(transport, outputs, input);
    default: return direct::all_gather(transport, outputs, input);
  }
}

void all_to_all(Transport& transport, std::span<const Bytes> outputs,
                std::span<const ConstBytes> inputs) {
  direct::all_to_all(transport, outputs, inputs);
}

void broadcast(Transport& transport, Algorithm algorithm, Bytes data, int root) {
  switch (for_size_of(transport, algorithm)) {
    case Algorithm::tree: return tree::broadcast(transport, data, root);
    case Algorithm::hierarchical: return hierarchical::broadcast(transport, data, root);
    default: return direct::broadcast(transport, data, root);
  }
}

// An all-reduce without elements: it ends once a message from every rank has arrived.
void barrier(Transport& transport) {
  const Reduction nothing{DType::uint8, ReduceOp::sum};
  const Algorithm algorithm = transport.size() > kManyRanks ? Algorithm::tree : Algorithm::direct;
  all_reduce(transport, algorithm, nothing, {});
}

}  // namespace lockstep::comm
