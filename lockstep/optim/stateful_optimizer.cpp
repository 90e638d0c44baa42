#include <lockstep/optim/stateful_optimizer.h>

#include <cmath>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/base/hash.h>
#include <lockstep/optim/saved_state.h>

namespace lockstep::optim {

namespace {

std::string shape_of_type(at::ScalarType type, const at::Tensor& of) {
  return fmt::format("{} [{}]", c10::toString(type), fmt::join(of.sizes(), ", "));
}

void check_number(const char* what, double value) {
  if (!std::isfinite(value) || value < 0)
    throw UsageError("{} is {}; it must be a number from 0 up", what, value);
}

}  // namespace

StatefulOptimizer::StatefulOptimizer(std::vector<ParameterGroup> groups,
                                     std::vector<std::string> state_names, NarrowWeights narrow)
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
    const bool is_narrow = type == at::kHalf || type == at::kBFloat16;
    if (is_narrow && narrow == NarrowWeights::taken) continue;
    if (is_narrow)
      throw UsageError(
          "parameter '{}' is {}, and this optimizer looks at whole parameters, which it "
          "does in Float and Double only: take one that goes by elements, such as "
          "AdamW, or keep the weights in Float and cast where they are used",
          name, c10::toString(type));
    throw UsageError("parameter '{}' is {}: optimizers step on Float, Double, BFloat16 and Half",
                     name, c10::toString(type));
  }
  for (ParameterGroup& group : groups)
    for (NamedParameter& parameter : group.parameters) add(std::move(parameter), group);
}

void StatefulOptimizer::add(NamedParameter parameter, const ParameterGroup& group) {
  Parameter added{.named = std::move(parameter),
                  .weight_decay = group.weight_decay,
                  .learning_rate_factor = group.learning_rate_factor};
  const at::Tensor& tensor = added.named.tensor;
  added.type = tensor.scalar_type();
  const bool is_narrow = added.type == at::kHalf || added.type == at::kBFloat16;
  if (is_narrow) {
    const std::string& name = added.named.name;
    added.narrow.rounding = group.sixteen_bits.rounding;
    added.narrow.random.key =
        hash_text(fmt::format("{}/rounding/{}", group.sixteen_bits.seed, name));
    if (group.elements_before) added.narrow.random.first = group.elements_before(name);
  }
  const at::ScalarType state_type =
      is_narrow && !group.sixteen_bits.in_state ? at::kFloat : added.type;
  for (std::size_t i = 0; i < state_names_.size(); ++i)
    added.state.push_back(
        at::zeros(tensor.sizes(), at::TensorOptions().dtype(state_type).device(tensor.device())));
  parameters_.push_back(std::move(added));
}

std::int64_t StatefulOptimizer::num_steps(const Parameter& parameter) const {
  const bool left_out = parameter.in_last_step && last_factor_.value() == 0;
  return parameter.step - (left_out ? 1 : 0);
}

void StatefulOptimizer::settle_last_step() {
  for (Parameter& parameter : parameters_) {
    parameter.step = num_steps(parameter);
    parameter.in_last_step = false;
  }
}

void StatefulOptimizer::step(double learning_rate, const StepFactor& factor) {
  const c10::NoGradGuard no_grad;
  settle_last_step();
  // Everything is checked before anything is changed.
  check_number("the learning rate", learning_rate);
  std::vector<ParameterStep> steps;
  std::vector<Parameter*> stepped;
  for (Parameter& parameter : parameters_) {
    const auto& [name, tensor] = parameter.named;
    for (const at::Tensor& state : parameter.state)
      if (state.device() != tensor.device() || parameter.type != tensor.scalar_type() ||
          state.sizes() != tensor.sizes())
        throw UsageError("parameter '{}' is {} on {}, but was {} on {} when the optimizer was "
                         "made: move, convert and cut a model before that",
                         name, type_and_shape(tensor), tensor.device().str(),
                         shape_of_type(parameter.type, state), state.device().str());
    at::Tensor gradient = gradient_of(parameter.named);
    if (!gradient.defined()) continue;
    const bool in_memory = tensor.device().is_cpu();
    steps.push_back({.name = name,
                     .numbers = {.learning_rate = learning_rate * parameter.learning_rate_factor,
                                 .weight_decay = parameter.weight_decay,
                                 .step = parameter.step + 1,
                                 .narrow = parameter.narrow},
                     .weight = in_memory ? tensor.contiguous() : tensor,
                     .gradient = in_memory ? gradient.contiguous() : std::move(gradient),
                     .state = &parameter.state});
    steps.back().numbers.narrow.random.step = static_cast<std::uint64_t>(parameter.step + 1);
    stepped.push_back(&parameter);
  }

  std::vector<at::Tensor> multiplied_here;
  bool needs_value = false;
  for (const ParameterStep& one : steps) {
    if (takes_factor(one)) continue;
    needs_value = true;
    if (!one.is_narrow()) multiplied_here.push_back(one.gradient);
  }
  if (needs_value && !factor.is_one()) {
    if (factor.value() == 0) return;
    multiply(multiplied_here, factor.value());
    for (ParameterStep& one : steps) one.numbers.narrow.gradient_factor = factor.value();
  }
  move(steps, factor);
  last_factor_ = factor;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const at::Tensor& parameter = stepped[i]->named.tensor;
    stepped[i]->step = steps[i].numbers.step;
    stepped[i]->in_last_step = true;
    if (!steps[i].in_memory()) continue;
    if (steps[i].weight.is_same(parameter))
      // So that autograd notices a backward that comes too late.
      parameter.unsafeGetTensorImpl()->bump_version();
    else
      parameter.copy_(steps[i].weight);
  }
}

void StatefulOptimizer::zero_grad() {
  for (const Parameter& parameter : parameters_)
    if (parameter.named.tensor.grad().defined())
      parameter.named.tensor.mutable_grad() = at::Tensor();
}

std::vector<NamedTensor> StatefulOptimizer::state() const {
  std::vector<NamedTensor> result;
  for (const Parameter& parameter : parameters_) {
    const std::string& name = parameter.named.name;
    result.push_back({"step." + name, at::scalar_tensor(num_steps(parameter), at::kLong)});
    for (std::size_t i = 0; i < state_names_.size(); ++i)
      result.push_back({state_names_[i] + "." + name, parameter.state[i]});
  }
  return result;
}

void StatefulOptimizer::load_state(const std::vector<NamedTensor>& saved) {
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
