#include <lockstep/optim/elementwise_optimizer.h>

#include <lockstep/optim/parallel_blocks.h>

namespace lockstep::optim {

void ElementwiseOptimizer::move(const std::vector<ParameterStep>& steps, const StepFactor& factor) {
  std::vector<std::int64_t> counts;
  std::vector<ParameterStep> elsewhere;
  for (const ParameterStep& step : steps) {
    counts.push_back(step.in_memory() ? step.weight.numel() : 0);
    if (!step.in_memory()) elsewhere.push_back(step);
  }
  parallel_blocks(counts, kUpdateBlock, [&](const Block& block) {
    const ParameterStep& step = steps[block.range];
    if (step.weight.scalar_type() == at::kFloat)
      update(step.numbers, stretch_of<float>(step, block.begin, block.count));
    else
      update(step.numbers, stretch_of<double>(step, block.begin, block.count));
  });
  if (!elsewhere.empty()) update(elsewhere, factor);
}

}  // namespace lockstep::optim
