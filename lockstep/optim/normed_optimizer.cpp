#include <lockstep/optim/normed_optimizer.h>

#include <cmath>

#include <ATen/ATen.h>

#include <lockstep/optim/kernels/gradients.h>
#include <lockstep/optim/parallel_blocks.h>

namespace lockstep::optim {

namespace {

std::vector<std::int64_t> counts_in_memory(std::span<const ParameterStep> steps) {
  std::vector<std::int64_t> counts;
  for (const ParameterStep& step : steps)
    counts.push_back(step.in_memory() ? step.weight.numel() : 0);
  return counts;
}

}  // namespace

void NormedOptimizer::move(const std::vector<ParameterStep>& steps, const StepFactor&) {
  const std::span<const ParameterStep> all(steps);
  if (parts_ != nullptr) return move_together(all);
  for (std::size_t begin = 0, end = 0; begin < all.size(); begin = end) {
    std::int64_t elements = 0;
    while (end < all.size() &&
           (end == begin || elements + all[end].weight.numel() <= kMostTogether))
      elements += all[end++].weight.numel();
    move_together(all.subspan(begin, end - begin));
  }
}

void NormedOptimizer::move_together(std::span<const ParameterStep> steps) const {
  if (steps.empty()) return;
  std::vector<at::Tensor> directions;
  for (const ParameterStep& step : steps)
    directions.push_back(step.in_memory() ? at::empty_like(step.weight) : direction(step));
  const std::vector<std::int64_t> counts = counts_in_memory(steps);
  parallel_blocks(counts, kUpdateBlock, [&](const Block& block) {
    const ParameterStep& step = steps[block.range];
    const at::Tensor& to = directions[block.range];
    if (step.weight.scalar_type() == at::kFloat)
      direct(step.numbers, stretch_of<float>(step, block.begin, block.count),
             to.data_ptr<float>() + block.begin);
    else
      direct(step.numbers, stretch_of<double>(step, block.begin, block.count),
             to.data_ptr<double>() + block.begin);
  });

  // The norms of all weights, and then of all directions.
  std::vector<NamedTensor> measured;
  for (const ParameterStep& step : steps) measured.push_back({std::string(step.name), step.weight});
  for (std::size_t i = 0; i < steps.size(); ++i)
    measured.push_back({std::string(steps[i].name), directions[i]});
  const std::vector<double> squares = parts_ != nullptr ? parts_->sums_of_squares(measured)
                                                        : WholeParts().sums_of_squares(measured);
  std::vector<double> lengths;
  for (std::size_t i = 0; i < steps.size(); ++i)
    lengths.push_back(
        length(steps[i].numbers, std::sqrt(squares[i]), std::sqrt(squares[steps.size() + i])));

  parallel_blocks(counts, kUpdateBlock, [&](const Block& block) {
    const at::Tensor &weight = steps[block.range].weight, &from = directions[block.range];
    if (weight.scalar_type() == at::kFloat)
      subtract(block.count, static_cast<float>(lengths[block.range]),
               from.data_ptr<float>() + block.begin, weight.data_ptr<float>() + block.begin);
    else
      subtract(block.count, lengths[block.range], from.data_ptr<double>() + block.begin,
               weight.data_ptr<double>() + block.begin);
  });
  for (std::size_t i = 0; i < steps.size(); ++i)
    if (!steps[i].in_memory()) steps[i].weight.add_(directions[i], -lengths[i]);
}

}  // namespace lockstep::optim
