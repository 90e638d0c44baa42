#include <lockstep/plan/measured/module_sizes.h>

#include <unordered_map>

#include <lockstep/optim/options/optimizer_options.h>
#include <lockstep/parallel/data_parallel/model_parameters.h>

namespace lockstep::plan {

ModelSizes sizes_of(const torch::nn::Module& module, const shard::UnitPolicy& policy) {
  ModelSizes sizes;
  std::unordered_map<const void*, std::size_t> unit_of;
  for (const shard::PlannedUnit& unit : shard::plan_units(module, policy)) {
    const at::Tensor& first = unit.parameters.front().tensor;
    for (const NamedTensor& parameter : unit.parameters)
      unit_of[parameter.tensor.unsafeGetTensorImpl()] = sizes.units.size();
    sizes.units.push_back({.num_elements = unit.num_elements(),
                           .element_bytes = static_cast<std::int64_t>(first.element_size()),
                           .trained = first.requires_grad()});
  }
  for (const auto& [name, tensor] : data_parallel::distinct_tensors(module.named_parameters()))
    sizes.parameters.push_back(
        {.num_elements = tensor.numel(),
         .unit = unit_of.at(tensor.unsafeGetTensorImpl()),
         .matrix_rows = optim::is_hidden_matrix(name, tensor.sizes()) ? tensor.size(0) : 0});
  for (const NamedTensor& buffer : data_parallel::distinct_tensors(module.named_buffers()))
    sizes.buffer_bytes += static_cast<std::int64_t>(buffer.tensor.nbytes());
  return sizes;
}

}  // namespace lockstep::plan
