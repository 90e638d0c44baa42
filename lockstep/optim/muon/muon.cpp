#include <algorithm>
#include <cmath>
#include <utility>

#include <ATen/ATen.h>

#include <lockstep/device/autocast.h>
#include <lockstep/optim/adamw/plain/options.h>
#include <lockstep/optim/joined_optimizer.h>
#include <lockstep/optim/matrix_optimizer.h>
#include <lockstep/optim/muon/plain/kernel.h>
#include <lockstep/optim/muon/plain/options.h>
#include <lockstep/optim/sum_of_squares.h>

namespace lockstep::optim {

namespace {

// Five steps of an odd polynomial bring singular values from (0, 1] to about 0.7 to 1.2 (Jordan).
constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;
constexpr double kNormEps = 1e-7;

// U·V' for U·S·V', nearly: x ← a·x + (b·x·x' + c·(x·x')²)·x. It has memory for twice the matrix,
// and twice the square of its smaller side. The norm is summed over fixed blocks, so that it does
// not depend on the number of threads.
at::Tensor orthogonalised(at::Tensor x, std::int64_t num_steps) {
  if (const auto type = x.device().type(); device::Autocast::active(type)) {
    const device::Autocast full = device::Autocast::off(type);
    return orthogonalised(std::move(x), num_steps);
  }
  const bool is_tall = x.size(0) > x.size(1);
  const at::Tensor blocks = sums_of_squares(std::vector{x});
  const at::Tensor norm = add_in_order(blocks, {{{0, blocks.numel()}}}).sqrt_().add_(kNormEps);
  x.div_(norm.to(x.scalar_type()));
  if (is_tall) x = x.t();
  for (std::int64_t step = 0; step < num_steps; ++step) {
    const at::Tensor square = at::mm(x, x.t());
    x = at::addmm(x, at::addmm(square, square, square, /*beta=*/kB, /*alpha=*/kC), x, /*beta=*/kA);
  }
  return is_tall ? x.t() : x;
}

// State: momentum_buffer.
class MuonMatrices final : public MatrixOptimizer {
 public:
  MuonMatrices(std::vector<ParameterGroup> groups, const MuonOptions& options,
               std::shared_ptr<Parts> parts)
      : MatrixOptimizer(std::move(groups), options.matrix_state_names(), std::move(parts)),
        options_(options) {}

 private:
  template <typename T>
  void prepare_stretch(const Stretch<T>& stretch, T* prepared) const {
    muon_push(MuonStep<T>{.momentum = static_cast<T>(options_.momentum),
                          .one_minus_momentum = static_cast<T>(1 - options_.momentum),
                          .nesterov = options_.nesterov},
              stretch.count, stretch.gradient, stretch.state[0], prepared);
  }
  void prepare(const StepNumbers&, const Stretch<float>& stretch, float* prepared) const override {
    prepare_stretch(stretch, prepared);
  }
  void prepare(const StepNumbers&, const Stretch<double>& stretch,
               double* prepared) const override {
    prepare_stretch(stretch, prepared);
  }
  at::Tensor prepare(const ParameterStep& elsewhere) const override {
    const at::Tensor& momentum = elsewhere.state->front();
    const at::Tensor& gradient = elsewhere.gradient;
    momentum.mul_(options_.momentum).add_(gradient, 1 - options_.momentum);
    if (!options_.nesterov) return momentum.clone();
    return at::mul(momentum, options_.momentum).add_(gradient, 1 - options_.momentum);
  }

  at::Tensor change(at::Tensor prepared) const override {
    return orthogonalised(std::move(prepared), options_.ns_steps);
  }

  double rate(const StepNumbers& numbers, const MatrixShape& shape) const {
    const auto rows = static_cast<double>(shape.rows), columns = static_cast<double>(shape.columns);
    return numbers.learning_rate * (options_.adjust_lr_fn == MuonRate::original
                                        ? std::sqrt(std::max(1.0, rows / columns))
                                        : 0.2 * std::sqrt(std::max(rows, columns)));
  }
  static double kept(const StepNumbers& numbers) {
    return 1 - numbers.learning_rate * numbers.weight_decay;
  }

  template <typename T>
  void apply_stretch(const StepNumbers& numbers, const MatrixShape& shape,
                     const Stretch<T>& stretch, const T* direction) const {
    muon_move(static_cast<T>(kept(numbers)), static_cast<T>(rate(numbers, shape)), stretch.count,
              direction, stretch.weight);
  }
  void apply(const StepNumbers& numbers, const MatrixShape& shape, const Stretch<float>& stretch,
             const float* direction) const override {
    apply_stretch(numbers, shape, stretch, direction);
  }
  void apply(const StepNumbers& numbers, const MatrixShape& shape, const Stretch<double>& stretch,
             const double* direction) const override {
    apply_stretch(numbers, shape, stretch, direction);
  }
  void apply(const MatrixShape& shape, const ParameterStep& elsewhere,
             const at::Tensor& direction) const override {
    elsewhere.weight.mul_(kept(elsewhere.numbers)).add_(direction, -rate(elsewhere.numbers, shape));
  }

  MuonOptions options_;
};

bool moves_as_matrix(const NamedParameter& parameter, MatrixRule rule, const Parts& parts) {
  const std::vector<std::int64_t> shape = parts.whole_shape(parameter.name, parameter.tensor);
  switch (rule) {
    case MatrixRule::by_name: return is_hidden_matrix(parameter.name, shape);
    case MatrixRule::all: return is_hidden_matrix("", shape);
    case MatrixRule::none: break;
  }
  return false;
}

}  // namespace

std::unique_ptr<Optimizer> MuonOptions::make(std::vector<ParameterGroup> groups,
                                             std::shared_ptr<Parts> parts) const {
  if (parts == nullptr) parts = std::make_shared<WholeParts>();
  std::vector<NamedParameter> all;
  for (const ParameterGroup& group : groups)
    all.insert(all.end(), group.parameters.begin(), group.parameters.end());
  check_distinct(all);
  std::vector<ParameterGroup> matrices, others;
  for (ParameterGroup& group : groups) {
    ParameterGroup matrix = group;
    matrix.parameters.clear();
    ParameterGroup other = matrix;
    if (muon_lr) matrix.learning_rate_factor *= *muon_lr / lr;
    if (adam_lr) other.learning_rate_factor *= *adam_lr / lr;
    for (NamedParameter& parameter : group.parameters)
      (moves_as_matrix(parameter, group.matrices, *parts) ? matrix : other)
          .parameters.push_back(std::move(parameter));
    matrices.push_back(std::move(matrix));
    others.push_back(std::move(other));
  }
  std::vector<std::unique_ptr<Optimizer>> both;
  both.push_back(AdamWOptions{.betas = betas, .eps = eps}.make(std::move(others), nullptr));
  both.push_back(std::make_unique<MuonMatrices>(std::move(matrices), *this, std::move(parts)));
  return joined(std::move(both));
}

}  // namespace lockstep::optim
