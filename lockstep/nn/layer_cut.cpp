#include <lockstep/nn/layer_cut.h>

#include <c10/core/GradMode.h>

#include <lockstep/mesh/tensor_part.h>

namespace lockstep::nn {

std::vector<CutParameter> cut_parameters(const torch::nn::Module& model) {
  std::vector<CutParameter> all;
  for (const auto& item : model.named_modules()) {
    const auto* const layer = dynamic_cast<const CuttableLayer*>(item.value().get());
    if (layer == nullptr) continue;
    for (CutParameter& one : layer->cut_parameters()) {
      if (!item.key().empty()) one.name = item.key() + "." + one.name;
      all.push_back(std::move(one));
    }
  }
  return all;
}

namespace internal {

void keep_part(at::Tensor& parameter, const mesh::Placement& placement, at::IntArrayRef shape) {
  const c10::NoGradGuard no_grad;
  parameter.set_data(mesh::part_of(parameter.detach(), placement).reshape(shape));
}

}  // namespace internal

}  // namespace lockstep::nn
