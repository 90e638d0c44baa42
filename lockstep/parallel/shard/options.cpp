#include <lockstep/parallel/shard/options.h>

#include <spdlog/fmt/fmt.h>
#include <torch/nn/modules/batchnorm.h>

#include <lockstep/base/error.h>

namespace lockstep::shard {

void check(const CPUOffload& offload) {
  if (offload.offload_params && !offload.offload_optimizer)
    throw UsageError(
        "parameters are to be offloaded to the host's memory and the optimizer is not, "
        "which would bring them back for every step: set offload_optimizer as well");
}

bool is_batch_norm(const torch::nn::Module& module) {
  using namespace torch::nn;
  return dynamic_cast<const BatchNorm1dImpl*>(&module) != nullptr ||
         dynamic_cast<const BatchNorm2dImpl*>(&module) != nullptr ||
         dynamic_cast<const BatchNorm3dImpl*>(&module) != nullptr ||
         // Parts of a TorchScript model have the names of their classes in Python.
         module.name() == "BatchNorm1d" || module.name() == "BatchNorm2d" ||
         module.name() == "BatchNorm3d";
}

void check(const MixedPrecision& precision) {
  const auto check_type = [](const char* name, std::optional<c10::ScalarType> type) {
    if (!type || *type == c10::kFloat || *type == c10::kHalf || *type == c10::kBFloat16) return;
    throw UsageError("mixed precision with a {} of {}: Float, Half and BFloat16 can be had", name,
                     c10::toString(*type));
  };
  check_type("param_dtype", precision.param_dtype);
  check_type("reduce_dtype", precision.reduce_dtype);
  check_type("buffer_dtype", precision.buffer_dtype);
  if (precision.master_dtype && *precision.master_dtype != c10::kHalf &&
      *precision.master_dtype != c10::kBFloat16)
    throw UsageError("mixed precision with a master_dtype of {}: Half and BFloat16 can be had, and "
                     "weights keep their type where it is not given",
                     c10::toString(*precision.master_dtype));
  if (precision.master_dtype && precision.param_dtype != precision.master_dtype)
    throw UsageError("mixed precision with a master_dtype of {} and {}: ranks send each other the "
                     "weights that the optimizer steps on; give param_dtype the same type",
                     c10::toString(*precision.master_dtype),
                     precision.param_dtype
                         ? fmt::format("a param_dtype of {}", c10::toString(*precision.param_dtype))
                         : "no param_dtype");
  if (precision.buffer_dtype && !precision.param_dtype)
    throw UsageError(
        "mixed precision with a buffer_dtype and no param_dtype: buffers are of another "
        "type where operators compute in param_dtype; give both");
}

KeepType parameters_of_batch_norms(const torch::nn::Module& module) {
  KeepType found;
  for (const auto& part : module.modules())
    if (is_batch_norm(*part))
      for (const at::Tensor& parameter : part->parameters())
        found.insert(parameter.unsafeGetTensorImpl());
  return found;
}

bool computes_in_param_dtype(const MixedPrecision& precision, c10::Device device) {
  return precision.param_dtype.has_value() &&
         (precision.compute == Compute::in_param_dtype || !device.is_cpu());
}

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

Groups shard_over(const std::shared_ptr<comm::Communicator>& all) {
  return {.all = all,
          .gather = all->split(0, all->rank(), "gather_parameters"),
          .reduce = all,
          .replicas = nullptr};
}

Groups shard_over(const std::shared_ptr<comm::Communicator>& all,
                  const std::shared_ptr<comm::Communicator>& shard,
                  const std::shared_ptr<comm::Communicator>& replicas) {
  if (replicas->size() == 1) return shard_over(all);
  return {.all = all,
          .gather = shard->split(0, shard->rank(), "gather_parameters"),
          .reduce = shard,
          .replicas = replicas};
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
