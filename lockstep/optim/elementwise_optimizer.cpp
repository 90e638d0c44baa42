#include <lockstep/optim/elementwise_optimizer.h>

#include <cmath>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/base/error.h>
#include <lockstep/optim/parallel_blocks.h>
#include <lockstep/optim/saved_state.h>

namespace lockstep::optim {

namespace {

// What one call of a kernel takes on.
constexpr std::int64_t kUpdateBlock = 32768;  // elements

void check_number(const char* what, double value) {
  if (!std::isfinite(value) || value < 0)
    throw UsageError("{} is {}; it must be a number from 0 up", what, value);
}

template <typename T>
Stretch<T> stretch_of(const at::Tensor& weight, const at::Tensor& gradient,
                      const std::vector<at::Tensor>& state, std::int64_t begin,
                      std::int64_t count) {
  Stretch<T> stretch{.count = count,
                     .weight = weight.data_ptr<T>() + begin,
                     .gradient = gradient.data_ptr<T>() + begin};
  for (const at::Tensor& tensor : state) stretch.state.push_back(tensor.data_ptr<T>() + begin);
  return stretch;
}

}  // namespace

// One parameter's part of a step. In this process's memory, all tensors are contiguous.
struct ElementwiseOptimizer::Update {
  Parameter* parameter = nullptr;
  StepNumbers numbers;
  at::Tensor weight;  // the parameter's own, or a contiguous copy of it
  at::Tensor gradient;
};

ElementwiseOptimizer::ElementwiseOptimizer(std::vector<ParameterGroup> groups,
                                           std::vector<std::string> state_names)
    : state_names_(std::move(state_names)) {
  std::vector<NamedParameter> all;
  for (const ParameterGroup& group : groups) {
    check_number("a group's weight_decay", group.weight_decay);
    check_number("a group's learning_rate_factor", group.learning_rate_factor);
    all.insert(all.end(), group.parameters.begin(), group.parameters.end());
  }
  check_distinct(all);
  for (const auto& [name, tensor] : all) {
    const auto type = tensor.scalar_type();
    if (type == at::kFloat || type == at::kDouble) continue;
    throw UsageError("parameter '{}' is {}: optimizers step on Float and Double only, as small "
                     "steps are lost in 16 bits; keep the weights in Float and cast where they "
                     "are used",
                     name, c10::toString(type));
  }
  for (ParameterGroup& group : groups)
    for (NamedParameter& parameter : group.parameters) add(std::move(parameter), group);
}

void ElementwiseOptimizer::add(NamedParameter parameter, const ParameterGroup& group) {
  Parameter added{.named = std::move(parameter),
                  .weight_decay = group.weight_decay,
                  .learning_rate_factor = group.learning_rate_factor};
  const at::Tensor& tensor = added.named.tensor;
  for (std::size_t i = 0; i < state_names_.size(); ++i)
    added.state.push_back(at::zeros(
        tensor.sizes(), at::TensorOptions().dtype(tensor.scalar_type()).device(tensor.device())));
  parameters_.push_back(std::move(added));
}

// Everything is checked before anything is changed.
std::vector<ElementwiseOptimizer::Update> ElementwiseOptimizer::updates(double learning_rate) {
  check_number("the learning rate", learning_rate);
  std::vector<Update> result;
  result.reserve(parameters_.size());
  for (Parameter& parameter : parameters_) {
    const auto& [name, tensor] = parameter.named;
    for (const at::Tensor& state : parameter.state)
      if (state.device() != tensor.device() || state.scalar_type() != tensor.scalar_type() ||
          state.sizes() != tensor.sizes())
        throw UsageError("parameter '{}' is {} on {}, but was {} on {} when the optimizer was "
                         "made: move, convert and cut a model before that",
                         name, type_and_shape(tensor), tensor.device().str(), type_and_shape(state),
                         state.device().str());
    at::Tensor gradient = gradient_of(parameter.named);
    if (!gradient.defined()) continue;
    const bool in_memory = tensor.device().is_cpu();
    result.push_back({.parameter = &parameter,
                      .numbers = {.learning_rate = learning_rate * parameter.learning_rate_factor,
                                  .weight_decay = parameter.weight_decay,
                                  .step = parameter.step + 1},
                      .weight = in_memory ? tensor.contiguous() : tensor,
                      .gradient = in_memory ? gradient.contiguous() : std::move(gradient)});
  }
  return result;
}

void ElementwiseOptimizer::update_block(const Update& part, std::int64_t begin,
                                        std::int64_t count) const {
  const auto& state = part.parameter->state;
  if (part.weight.scalar_type() == at::kFloat)
    update(part.numbers, stretch_of<float>(part.weight, part.gradient, state, begin, count));
  else
    update(part.numbers, stretch_of<double>(part.weight, part.gradient, state, begin, count));
}

std::int64_t ElementwiseOptimizer::num_steps(const Parameter& parameter) const {
  const bool left_out = parameter.in_last_step && last_factor_.value() == 0;
  return parameter.step - (left_out ? 1 : 0);
}

void ElementwiseOptimizer::settle_last_step() {
  for (Parameter& parameter : parameters_) {
    parameter.step = num_steps(parameter);
    parameter.in_last_step = false;
  }
}

void ElementwiseOptimizer::step(double learning_rate, const StepFactor& factor) {
  const c10::NoGradGuard no_grad;
  settle_last_step();
  const std::vector<Update> parts = updates(learning_rate);
  std::vector<std::int64_t> counts;
  std::vector<DeviceUpdate> elsewhere;
  std::vector<at::Tensor> multiplied_here;
  for (const Update& part : parts) {
    const bool in_memory = part.weight.device().is_cpu();
    counts.push_back(in_memory ? part.weight.numel() : 0);
    if (!in_memory)
      elsewhere.push_back({part.numbers, part.weight, part.gradient, &part.parameter->state});
    if (in_memory || !takes_factor(elsewhere.back())) multiplied_here.push_back(part.gradient);
  }
  if (!multiplied_here.empty() && !factor.is_one()) {
    if (factor.value() == 0) return;
    multiply(multiplied_here, factor.value());
  }
  parallel_blocks(counts, kUpdateBlock, [&](const Block& block) {
    update_block(parts[block.range], block.begin, block.count);
  });
  last_factor_ = factor;
  for (const Update& part : parts) {
    const at::Tensor& parameter = part.parameter->named.tensor;
    part.parameter->step = part.numbers.step;
    part.parameter->in_last_step = true;
    if (!part.weight.device().is_cpu()) continue;
    if (part.weight.is_same(parameter))
      // So that autograd notices a backward that comes too late.
      parameter.unsafeGetTensorImpl()->bump_version();
    else
      parameter.copy_(part.weight);
  }
  if (!elsewhere.empty()) update(elsewhere, factor);
}

void ElementwiseOptimizer::zero_grad() {
  for (const Parameter& parameter : parameters_)
    if (parameter.named.tensor.grad().defined())
      parameter.named.tensor.mutable_grad() = at::Tensor();
}

std::vector<NamedTensor> ElementwiseOptimizer::state() const {
  std::vector<NamedTensor> result;
  for (const Parameter& parameter : parameters_) {
    const std::string& name = parameter.named.name;
    result.push_back({"step." + name, at::scalar_tensor(num_steps(parameter), at::kLong)});
    for (std::size_t i = 0; i < state_names_.size(); ++i)
      result.push_back({state_names_[i] + "." + name, parameter.state[i]});
  }
  return result;
}

void ElementwiseOptimizer::load_state(const std::vector<NamedTensor>& saved) {
  const c10::NoGradGuard no_grad;
  const std::vector<at::Tensor> matched = match_saved_state(state(), saved);
  const std::size_t stride = 1 + state_names_.size();
  std::vector<std::int64_t> steps;
  for (std::size_t p = 0; p < parameters_.size(); ++p) {
    steps.push_back(matched[p * stride].item<std::int64_t>());
    if (steps.back() < 0)
      throw UsageError("the saved state has {} as step.{}: a count from 0 is needed", steps.back(),
                       parameters_[p].named.name);
  }
  for (std::size_t p = 0; p < parameters_.size(); ++p) {
    parameters_[p].step = steps[p];
    parameters_[p].in_last_step = false;
    for (std::size_t i = 0; i < state_names_.size(); ++i)
      parameters_[p].state[i].copy_(matched[p * stride + 1 + i]);
  }
}

}  // namespace lockstep::optim
