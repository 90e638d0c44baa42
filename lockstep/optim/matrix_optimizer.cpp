#include <lockstep/optim/matrix_optimizer.h>

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>

#include <lockstep/optim/parallel_blocks.h>

namespace lockstep::optim {

namespace {

MatrixShape matrix_of(at::IntArrayRef shape) {
  return {.rows = shape.front(), .columns = c10::multiply_integers(shape.slice(1))};
}

}  // namespace

MatrixOptimizer::MatrixOptimizer(std::vector<ParameterGroup> groups,
                                 std::vector<std::string> state_names, std::shared_ptr<Parts> parts)
    : StatefulOptimizer(std::move(groups), std::move(state_names)),
      parts_(parts != nullptr ? std::move(parts) : std::make_shared<WholeParts>()) {}

void MatrixOptimizer::move(const std::vector<ParameterStep>& steps, const StepFactor&) {
  std::vector<WholeMatrices::Matrix> matrices;
  std::vector<MatrixShape> shapes;
  for (const ParameterStep& step : steps) {
    std::vector<std::int64_t> shape = parts_->whole_shape(std::string(step.name), step.weight);
    shapes.push_back(matrix_of(shape));
    matrices.push_back({.name = std::string(step.name),
                        .type = step.weight.scalar_type(),
                        .shape = std::move(shape)});
  }
  parts_->compute_whole(
      matrices,
      {.take = [&](std::size_t i) { return prepared(steps[i]).view({-1}); },
       .compute =
           [&](std::size_t i, at::Tensor whole) {
             // The name goes, so that change() can let go of the memory.
             at::Tensor matrix = whole.view({shapes[i].rows, shapes[i].columns});
             whole.reset();
             return change(std::move(matrix));
           },
       .give = [&](std::size_t i,
                   const at::Tensor& direction) { move_along(steps[i], shapes[i], direction); }});
}

at::Tensor MatrixOptimizer::prepared(const ParameterStep& step) const {
  if (!step.in_memory()) return prepare(step).contiguous();
  const at::Tensor to = at::empty(step.weight.sizes(), step.weight.options());
  parallel_blocks(std::vector{step.weight.numel()}, kUpdateBlock, [&](const Block& block) {
    if (to.scalar_type() == at::kFloat)
      prepare(step.numbers, stretch_of<float>(step, block.begin, block.count),
              to.data_ptr<float>() + block.begin);
    else
      prepare(step.numbers, stretch_of<double>(step, block.begin, block.count),
              to.data_ptr<double>() + block.begin);
  });
  return to;
}

void MatrixOptimizer::move_along(const ParameterStep& step, const MatrixShape& shape,
                                 const at::Tensor& direction) const {
  const at::Tensor here = direction.to(step.weight.device()).contiguous();
  if (!step.in_memory()) return apply(shape, step, here.view(step.weight.sizes()));
  parallel_blocks(std::vector{step.weight.numel()}, kUpdateBlock, [&](const Block& block) {
    if (here.scalar_type() == at::kFloat)
      apply(step.numbers, shape, stretch_of<float>(step, block.begin, block.count),
            here.data_ptr<float>() + block.begin);
    else
      apply(step.numbers, shape, stretch_of<double>(step, block.begin, block.count),
            here.data_ptr<double>() + block.begin);
  });
}

}  // namespace lockstep::optim
