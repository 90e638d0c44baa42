#include <lockstep/optim/elementwise_optimizer.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/base/hash.h>
#include <lockstep/optim/parallel_blocks.h>
#include <lockstep/optim/parameters.h>
#include <lockstep/optim/round_with_operators.h>

namespace lockstep::optim {

namespace {

std::string shape_of_type(at::ScalarType type, at::IntArrayRef sizes) {
  return fmt::format("{} [{}]", c10::toString(type), fmt::join(sizes, ", "));
}

void check_number(const char* what, double value) {
  if (!std::isfinite(value) || value < 0)
    throw UsageError("{} is {}; it must be a number from 0 up", what, value);
}

}  // namespace

StatefulOptimizer::StatefulOptimizer(std::vector<ParameterGroup> groups,
                                     std::vector<std::string> state_names, NarrowWeights narrow,
                                     const MakeState& make_state)
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
      throw UsageError("parameter '{}' is {}, and this optimizer looks at whole parameters or "
                       "blocks of them, which it does in Float and Double only: take one that goes "
                       "by elements, such as AdamW, or keep the weights in Float and cast where "
                       "they are used",
                       name, c10::toString(type));
    throw UsageError("parameter '{}' is {}: optimizers step on Float, Double, BFloat16 and Half",
                     name, c10::toString(type));
  }
  for (ParameterGroup& group : groups)
    for (NamedParameter& parameter : group.parameters) add(std::move(parameter), group, make_state);
}

void StatefulOptimizer::add(NamedParameter parameter, const ParameterGroup& group,
                            const MakeState& make_state) {
  Parameter added{.named = std::move(parameter),
                  .weight_decay = group.weight_decay,
                  .learning_rate_factor = group.learning_rate_factor};
  const at::Tensor& tensor = added.named.tensor;
  added.type = tensor.scalar_type();
  added.sizes = tensor.sizes().vec();
  added.device = tensor.device();
  const std::string& name = added.named.name;
  if (group.elements_before) added.elements_before = group.elements_before(name);
  const bool is_narrow = added.type == at::kHalf || added.type == at::kBFloat16;
  if (is_narrow) {
    added.narrow.rounding = group.sixteen_bits.rounding;
    added.narrow.random.key =
        hash_text(fmt::format("{}/rounding/{}", group.sixteen_bits.seed, name));
    added.narrow.random.first = added.elements_before;
  }
  const at::ScalarType state_type =
      is_narrow && !group.sixteen_bits.in_state ? at::kFloat : added.type;
  if (make_state) added.state = make_state(tensor, added.elements_before);
  for (std::size_t i = 0; i < state_names_.size() && !make_state; ++i)
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
    if (!parameter.state.empty() &&
        (parameter.device != tensor.device() || parameter.type != tensor.scalar_type() ||
         parameter.sizes != tensor.sizes()))
      throw UsageError("parameter '{}' is {} on {}, but was {} on {} when the optimizer was "
                       "made: move, convert and cut a model before that",
                       name, type_and_shape(tensor), tensor.device().str(),
                       shape_of_type(parameter.type, parameter.sizes), parameter.device.str());
    at::Tensor gradient = gradient_of(parameter.named);
    if (!gradient.defined()) continue;
    const bool in_memory = tensor.device().is_cpu();
    steps.push_back({.name = name,
                     .numbers = {.learning_rate = learning_rate * parameter.learning_rate_factor,
                                 .weight_decay = parameter.weight_decay,
                                 .step = parameter.step + 1,
                                 .elements_before = parameter.elements_before,
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
    const std::vector<at::Tensor> saved = saved_state(held_state(parameter));
    for (std::size_t i = 0; i < state_names_.size(); ++i)
      result.push_back({state_names_[i] + "." + name, saved[i]});
  }
  return result;
}

std::int64_t StatefulOptimizer::state_bytes() const {
  std::int64_t bytes = 0;
  for (const Parameter& parameter : parameters_) {
    bytes += static_cast<std::int64_t>(sizeof(parameter.step));
    for (const at::Tensor& one : parameter.state) bytes += static_cast<std::int64_t>(one.nbytes());
  }
  return bytes;
}

HeldState StatefulOptimizer::held_state(const Parameter& parameter) {
  return {.name = parameter.named.name,
          .parameter = parameter.named.tensor,
          .elements_before = parameter.elements_before,
          .state = &parameter.state};
}

void StatefulOptimizer::take_saved(const std::vector<HeldState>& held,
                                   const std::vector<std::vector<at::Tensor>>& saved) {
  for (std::size_t p = 0; p < held.size(); ++p)
    for (std::size_t i = 0; i < saved[p].size(); ++i) held[p].state->at(i).copy_(saved[p][i]);
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
  std::vector<HeldState> held;
  std::vector<std::vector<at::Tensor>> of_parameters;
  for (std::size_t p = 0; p < parameters_.size(); ++p) {
    parameters_[p].step = steps[p];
    parameters_[p].in_last_step = false;
    held.push_back(held_state(parameters_[p]));
    const auto first = matched.begin() + static_cast<std::ptrdiff_t>(p * stride + 1);
    of_parameters.emplace_back(first, first + std::ssize(state_names_));
  }
  take_saved(held, of_parameters);
}

namespace {

// A thread's floats for a stretch of 16-bit numbers.
struct Floats {
  std::vector<float> weight, gradient;
  std::vector<std::vector<float>> state;
};

Floats& floats_of_this_thread() {
  thread_local Floats floats;
  return floats;
}

template <typename T>
T* numbers_of(const at::Tensor& tensor, std::int64_t begin) {
  return static_cast<T*>(tensor.data_ptr()) + begin;
}

template <typename T>
float* widened(const at::Tensor& tensor, std::int64_t begin, std::int64_t count,
               std::vector<float>& floats) {
  floats.resize(static_cast<std::size_t>(count));
  widen(numbers_of<T>(tensor, begin), count, floats.data());
  return floats.data();
}

RandomBits random_of_state(const ParameterStep& step, std::size_t state) {
  RandomBits random = step.numbers.narrow.random;
  random.key += 1 + state;
  return random;
}

template <typename T>
void write_back(const float* floats, const at::Tensor& to, std::int64_t begin, std::int64_t count,
                Rounding rounding, RandomBits random) {
  random.first += begin;
  if (rounding == Rounding::stochastic)
    narrow(floats, count, numbers_of<T>(to, begin), random);
  else
    narrow(floats, count, numbers_of<T>(to, begin));
}

}  // namespace

template <typename T>
void ElementwiseOptimizer::update_narrow(const ParameterStep& step, std::int64_t begin,
                                         std::int64_t count) const {
  Floats& floats = floats_of_this_thread();
  floats.state.resize(std::max(floats.state.size(), step.state->size()));
  Stretch<float> stretch{.count = count};
  stretch.weight = widened<T>(step.weight, begin, count, floats.weight);
  float* const gradient = widened<T>(step.gradient, begin, count, floats.gradient);
  if (step.numbers.narrow.gradient_factor != 1)
    scale(gradient, count, static_cast<float>(step.numbers.narrow.gradient_factor));
  stretch.gradient = gradient;
  for (std::size_t i = 0; i < step.state->size(); ++i) {
    const at::Tensor& state = step.state->at(i);
    stretch.state.push_back(state.scalar_type() == at::kFloat
                                ? state.data_ptr<float>() + begin
                                : widened<T>(state, begin, count, floats.state[i]));
  }
  update(step.numbers, stretch);
  const Rounding rounding = step.numbers.narrow.rounding;
  write_back<T>(stretch.weight, step.weight, begin, count, rounding, step.numbers.narrow.random);
  for (std::size_t i = 0; i < step.state->size(); ++i)
    if (step.state->at(i).scalar_type() != at::kFloat)
      write_back<T>(stretch.state[i], step.state->at(i), begin, count, rounding,
                    random_of_state(step, i));
}

// The same of a tensor on a device, by LibTorch's operators.
void ElementwiseOptimizer::update_narrow_elsewhere(const ParameterStep& step) const {
  ParameterStep wide = step;
  wide.weight = step.weight.to(at::kFloat);
  wide.gradient = step.gradient.to(at::kFloat);
  if (step.numbers.narrow.gradient_factor != 1)
    wide.gradient.mul_(step.numbers.narrow.gradient_factor);
  std::vector<at::Tensor> state;
  for (const at::Tensor& one : *step.state) state.push_back(one.to(at::kFloat));
  wide.state = &state;
  update({wide}, StepFactor());
  const Rounding rounding = step.numbers.narrow.rounding;
  round_with_operators(wide.weight, step.weight, rounding, step.numbers.narrow.random);
  for (std::size_t i = 0; i < state.size(); ++i)
    if (!state[i].is_same(step.state->at(i)))
      round_with_operators(state[i], step.state->at(i), rounding, random_of_state(step, i));
}

void ElementwiseOptimizer::move(const std::vector<ParameterStep>& steps, const StepFactor& factor) {
  std::vector<std::int64_t> counts;
  std::vector<ParameterStep> elsewhere;
  for (const ParameterStep& step : steps) {
    counts.push_back(step.in_memory() ? step.weight.numel() : 0);
    if (step.in_memory()) continue;
    if (step.is_narrow())
      update_narrow_elsewhere(step);
    else
      elsewhere.push_back(step);
  }
  parallel_blocks(counts, kUpdateBlock, [&](const Block& block) {
    const ParameterStep& step = steps[block.range];
    switch (step.weight.scalar_type()) {
      case at::kBFloat16: return update_narrow<BFloat16>(step, block.begin, block.count);
      case at::kHalf: return update_narrow<Float16>(step, block.begin, block.count);
      case at::kDouble:
        return update(step.numbers, stretch_of<double>(step, block.begin, block.count));
      default: return update(step.numbers, stretch_of<float>(step, block.begin, block.count));
    }
  });
  if (!elsewhere.empty()) update(elsewhere, factor);
}

}  // namespace lockstep::optim
