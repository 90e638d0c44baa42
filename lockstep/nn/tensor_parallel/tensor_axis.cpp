#include <lockstep/nn/tensor_parallel/tensor_axis.h>

#include <utility>

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <lockstep/base/error.h>
#include <lockstep/intercept/backward.h>
#include <lockstep/mesh/tensors.h>

namespace lockstep::nn {

const std::shared_ptr<comm::Communicator>& TensorAxis::holders_of_part(int num_parts) {
  LOCKSTEP_CHECK(num_parts > 0 && size() % num_parts == 0);
  auto& holders = holders_[num_parts];
  if (holders == nullptr) {
    const int part = rank() * num_parts / size();
    holders = group_->split(
        part, rank(), fmt::format("{}, holders of part {} of {}", group_->name(), part, num_parts));
  }
  return holders;
}

std::vector<CutParameter> cut_parameters(const torch::nn::Module& model) {
  std::vector<CutParameter> all;
  internal::for_each_module(model, [&](const std::string& name, const torch::nn::Module& module) {
    const auto* const layer = dynamic_cast<const CuttableLayer*>(&module);
    if (layer == nullptr) return;
    for (CutParameter& one : layer->cut_parameters()) {
      if (!name.empty()) one.name = name + "." + one.name;
      all.push_back(std::move(one));
    }
  });
  return all;
}

void refuse_wrapped(const torch::nn::Module& model, const std::string& function) {
  for (const auto& item : model.named_parameters())
    if (intercept::GradientHook::is_heard(item.value()))
      throw UsageError("{} was given '{}' of a model that is wrapped already, whose gradients "
                       "are exchanged as it is: call it before wrap_model()",
                       function, item.key());
}

namespace {

// The node is held by a std::weak_ptr or, in other versions, by a weak pointer of LibTorch's own
// that cannot be made empty directly.
template <typename Weak>
void forget_accumulator(const at::Tensor& parameter,
                        void (*set_accumulator)(const at::Tensor&, Weak)) {
  const decltype(torch::autograd::impl::try_get_grad_accumulator(parameter)) none;
  set_accumulator(parameter, Weak(none));
}

}  // namespace

namespace internal {

void keep_part(at::Tensor& parameter, const mesh::Placement& placement, at::IntArrayRef shape) {
  const c10::NoGradGuard no_grad;
  const auto part = [&](const at::Tensor& whole) {
    return mesh::part_of(whole.detach(), placement).reshape(shape);
  };
  const at::Tensor gradient = std::exchange(parameter.mutable_grad(), at::Tensor());
  parameter.set_data(part(parameter));
  if (gradient.defined()) parameter.mutable_grad() = part(gradient);
  // A graph that still lives keeps the node that takes this parameter's gradients with the whole
  // shape, so later graphs have to make another node.
  forget_accumulator(parameter, torch::autograd::impl::set_grad_accumulator);
}

}  // namespace internal

}  // namespace lockstep::nn
