#include <lockstep/parallel/shard/zero_plus_plus.h>

#include <lockstep/base/error.h>

namespace lockstep::shard {

void check_quantizes(const ZeroPlusPlusConfig& config, const std::vector<NamedTensor>& parameters) {
  if (!config.quantize_weights && !config.quantize_gradients) return;
  for (const auto& [name, tensor] : parameters) {
    const at::ScalarType type = tensor.scalar_type();
    if (type != at::kFloat && type != at::kHalf && type != at::kBFloat16)
      throw UsageError("'{}' is {}, and ZeRO++ quantizes Float, Half and BFloat16: convert the "
                       "model before wrap_model(), or leave quantize_weights and "
                       "quantize_gradients out",
                       name, c10::toString(type));
  }
}

Nodes make_nodes(const ZeroPlusPlusConfig& config, comm::Communicator& gather,
                 comm::Communicator& reduce) {
  const int per_node = config.hierarchical_partition;
  if (per_node < 0 || (config.has_nodes() && gather.size() % per_node != 0))
    throw UsageError("ZeRO++ with a hierarchical_partition of {} among {} ranks: it is how many of "
                     "them make a node, and has to divide them; 0 for no nodes",
                     per_node, gather.size());
  if (!config.has_nodes()) return {};
  return {.gather = gather.split(gather.rank() / per_node, gather.rank(), "node"),
          .reduce = comm::split_into_nodes(reduce, per_node)};
}

}  // namespace lockstep::shard
