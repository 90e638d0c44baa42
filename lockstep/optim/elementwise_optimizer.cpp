#include <lockstep/optim/elementwise_optimizer.h>

#include <algorithm>

#include <ATen/ATen.h>

#include <lockstep/optim/parallel_blocks.h>
#include <lockstep/optim/round_with_operators.h>

namespace lockstep::optim {

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
