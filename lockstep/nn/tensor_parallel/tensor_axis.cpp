#include <lockstep/nn/tensor_parallel/tensor_axis.h>

#include <utility>

#include <c10/core/GradMode.h>
#include <spdlog/fmt/ranges.h>
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
  const auto add = [&](const std::string& layer, std::vector<CutParameter> parameters) {
    for (CutParameter& one : parameters) {
      if (!layer.empty()) one.name = layer + "." + one.name;
      all.push_back(std::move(one));
    }
  };
  internal::for_each_module(model, [&](const std::string& name, const torch::nn::Module& module) {
    if (const auto* const layer = dynamic_cast<const CuttableLayer*>(&module))
      add(name, layer->cut_parameters());
    if (const auto* const record = dynamic_cast<const CutRecord*>(&module)) {
      const std::size_t dot = name.rfind('.');
      add(dot == name.npos ? "" : name.substr(0, dot), record->cut_parameters());
    }
  });
  return all;
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

// Other ranks, which wait for this one in their next sum, are told.
[[noreturn]] void refuse(const UsageError& error, const TensorAxis& axis) {
  axis.group()->note_refusal(error.what());
  throw error;
}

}  // namespace

namespace internal {

void check_part(const at::Tensor& parameter, const CutParameter& cut, const std::string& layer,
                const TensorAxis& axis) {
  if (parameter.defined() && parameter.sizes() == at::IntArrayRef(cut.part_shape)) return;
  const std::string shape =
      parameter.defined() ? fmt::format("{}", fmt::join(parameter.sizes(), ", ")) : "none";
  refuse(UsageError("'{}{}{}' is of shape [{}], and the part of it that this rank has, of the {} "
                    "ranks of '{}' that it is cut over, of shape [{}]: give the layer whole values "
                    "before it is cut, or with dist.load_full_state_dict()",
                    layer, layer.empty() ? "" : ".", cut.name, shape, axis.size(),
                    axis.group()->name(), fmt::join(cut.part_shape, ", ")),
         axis);
}

void refuse_file(const char* function, const std::string& layer, const TensorAxis& axis) {
  if (axis.size() == 1) return;
  refuse(UsageError("{} of '{}' is about this rank's part alone, as the layer is cut over the {} "
                    "ranks of '{}': write what dist.full_state_dict() returns on the main rank, "
                    "and load into the model before it is cut, or with "
                    "dist.load_full_state_dict(); nn::cut_parameters() says which part each rank "
                    "has",
                    function, layer, axis.size(), axis.group()->name()),
         axis);
}

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
