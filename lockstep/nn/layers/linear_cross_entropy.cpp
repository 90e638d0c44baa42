#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include <spdlog/fmt/ranges.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <lockstep/base/error.h>
#include <lockstep/device/autocast.h>
#include <lockstep/device/parallel_pieces.h>
#include <lockstep/intercept/once_differentiable.h>
#include <lockstep/mesh/placement/placement.h>
#include <lockstep/nn/kernels/cpu/softmax_kernels.h>
#include <lockstep/nn/layers/cross_entropy.h>
#include <lockstep/nn/tensor_parallel/tensor_axis.h>

#ifdef LOCKSTEP_HAVE_CUDA
#include <lockstep/nn/kernels/cuda/on_tensors.h>
#endif

namespace lockstep::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Bytes of logits that are in memory at once, at least one row. On a CPU that is about the size of
// its caches, with enough rows to read the weight seldom; a GPU needs more at a time to be busy.
constexpr std::int64_t kBlockBytesCpu = 16 << 20;
constexpr std::int64_t kBlockBytesGpu = 1 << 30;
// A GPU splits the rows of a product into tiles of this size or a fraction of it.
constexpr std::int64_t kRowsOfAProduct = 256;

struct Wanted {
  bool hidden = false;
  bool weight = false;

  bool any() const { return hidden || weight; }
};

at::Tensor in_full_precision(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? tensor : tensor.to(at::kFloat);
}

// The losses of a block of rows; if gradients are wanted, turns the block's logits into their
// gradient.
at::Tensor block_losses(at::Tensor& logits, const at::Tensor& targets, std::int64_t ignore_index,
                        Wanted wanted) {
#ifdef LOCKSTEP_HAVE_CUDA
  if (cuda::takes(logits)) {
    auto losses = at::empty({logits.size(0)}, logits.options().dtype(at::kFloat));
    cuda::launch_on(logits, [&](CUstream_st* stream) {
      cuda::softmax_cross_entropy({.logits = logits.data_ptr(),
                                   .type = cuda::element_of(logits.scalar_type()),
                                   .targets = targets.data_ptr<std::int64_t>(),
                                   .rows = logits.size(0),
                                   .vocabulary = logits.size(1),
                                   .ignore_index = ignore_index},
                                  losses.data_ptr<float>(), wanted.any(), stream);
    });
    return losses;
  }
#endif
  logits = in_full_precision(logits);
  if (logits.device().is_cpu() && logits.scalar_type() == at::kFloat) {
    const auto vocabulary = logits.size(1);
    auto losses = at::zeros({logits.size(0)}, logits.options());
    auto* values = logits.data_ptr<float>();
    const auto* target = targets.data_ptr<std::int64_t>();
    auto* loss = losses.data_ptr<float>();
    const auto grain = std::max<std::int64_t>(1, 65536 / std::max<std::int64_t>(1, vocabulary));
    device::parallel_pieces(logits.size(0), grain, [&](std::int64_t begin, std::int64_t end) {
      for (auto row = begin; row < end; ++row) {
        float* one = values + row * vocabulary;
        if (target[row] == ignore_index) {
          std::fill_n(one, vocabulary, 0.0f);
          continue;
        }
        const float right = one[target[row]];
        const float largest = internal::row_max(one, vocabulary, 1.0f);
        const float sum = internal::row_exp(one, one, vocabulary, 1.0f, largest);
        loss[row] = (largest - right) + std::log(sum);
        if (!wanted.any()) continue;
        internal::row_scale(one, vocabulary, 1.0f / sum);
        one[target[row]] -= 1.0f;
      }
    });
    return losses;
  }
  const auto valid = targets.ne(ignore_index);
  const auto indices = targets.masked_fill(valid.logical_not(), 0).unsqueeze(1);
  auto log_probabilities = logits.log_softmax(1);
  auto losses =
      log_probabilities.gather(1, indices).squeeze(1).neg().masked_fill(valid.logical_not(), 0);
  if (wanted.any()) {
    logits = log_probabilities.exp_();
    logits.scatter_add_(1, indices, at::full_like(indices, -1, logits.options()));
    logits.masked_fill_(valid.logical_not().unsqueeze(1), 0);
  }
  return losses;
}

// This rank's contribution to each row's loss, in float or double. `targets` is 0 where the target
// is not in this rank's part. `logits` are shifted and become exponentials.
struct PartialRows {
  at::Tensor sums;     // [rows]: sums of the exponentials
  at::Tensor targets;  // [rows]: the target's shifted logit
};

PartialRows exponentiate(at::Tensor& logits, const at::Tensor& largest, const at::Tensor& columns,
                         const at::Tensor& elsewhere) {
  logits.sub_(largest.unsqueeze(1));
  const at::Tensor right =
      logits.gather(1, columns.unsqueeze(1)).squeeze(1).masked_fill(elsewhere, 0);
  if (!logits.is_cpu() || logits.scalar_type() != at::kFloat)
    return {.sums = logits.exp_().sum(1), .targets = right};
  auto sums = at::empty_like(right);
  auto* values = logits.data_ptr<float>();
  auto* sum = sums.data_ptr<float>();
  const auto width = logits.size(1);
  const auto grain = std::max<std::int64_t>(1, 65536 / std::max<std::int64_t>(1, width));
  device::parallel_pieces(logits.size(0), grain, [&](std::int64_t begin, std::int64_t end) {
    for (auto row = begin; row < end; ++row)
      sum[row] = internal::row_exp(values + row * width, values + row * width, width, 1.0f, 0.0f);
  });
  return {.sums = sums, .targets = right};
}

// block_losses() for a group whose ranks each have the logits of a part of the vocabulary; this
// rank's part begins at `begin`.
at::Tensor split_block_losses(at::Tensor& logits, const at::Tensor& targets,
                              std::int64_t ignore_index, Wanted wanted, std::int64_t begin,
                              comm::Communicator& group) {
  logits = in_full_precision(logits);
  const at::Tensor ignored = targets.eq(ignore_index);
  const at::Tensor columns_of_all = targets - begin;
  const at::Tensor elsewhere =
      columns_of_all.lt(0).logical_or_(columns_of_all.ge(logits.size(1))).logical_or_(ignored);
  const at::Tensor columns = columns_of_all.masked_fill(elsewhere, 0);
  const at::Tensor largest = logits.amax(1);
  group.all_reduce(largest, comm::ReduceOp::max).wait();
  const PartialRows mine = exponentiate(logits, largest, columns, elsewhere);
  const at::Tensor both = at::stack({mine.sums, mine.targets});
  group.all_reduce(both).wait();
  const at::Tensor sums = both[0];
  const at::Tensor losses = (sums.log() - both[1]).masked_fill(ignored, 0);
  if (wanted.any()) {
    logits.mul_(sums.reciprocal().unsqueeze(1));
    logits.scatter_add_(1, columns.unsqueeze(1),
                        elsewhere.to(logits.scalar_type()).sub_(1).unsqueeze(1));
    logits.masked_fill_(ignored.unsqueeze(1), 0);
  }
  return losses;
}

// The rows of the weight that this rank has; without a group, all of them.
struct Rows {
  std::int64_t begin = 0;
  std::int64_t vocabulary = 0;
  std::shared_ptr<comm::Communicator> group = nullptr;

  // The most rows that any rank's part has.
  std::int64_t most() const { return (vocabulary + group->size() - 1) / group->size(); }
};

// The number of rows whose logits are computed together; on a GPU, an even share of all rows.
std::int64_t rows_at_once(const at::Tensor& inputs, std::int64_t vocabulary) {
  const bool on_cpu = inputs.device().is_cpu();
  // The block's logits are converted to floats in memory.
  const auto bytes = static_cast<std::int64_t>(
      on_cpu ? std::max<std::size_t>(inputs.element_size(), sizeof(float)) : inputs.element_size());
  const auto most = std::max<std::int64_t>(1, (on_cpu ? kBlockBytesCpu : kBlockBytesGpu) /
                                                  std::max<std::int64_t>(1, vocabulary * bytes));
  const auto rows = inputs.size(0);
  if (on_cpu || rows <= most) return most;
  const auto num_blocks = (rows + most - 1) / most;
  const auto share = (rows + num_blocks - 1) / num_blocks;
  return std::min(most, (share + kRowsOfAProduct - 1) / kRowsOfAProduct * kRowsOfAProduct);
}

// The gradients are computed in forward, from the block of logits at hand, and only scaled in
// backward. Computing the logits again would make four products of this size out of three (with a
// vocabulary of 50257 they are nearly all of the time), and would save no memory, because backward
// needs room for the gradients anyway.
class LinearCrossEntropy : public torch::autograd::Function<LinearCrossEntropy> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& hidden,
                            const at::Tensor& weight, const at::Tensor& targets,
                            std::int64_t ignore_index, Wanted wanted, const Rows& part,
                            at::ScalarType type) {
    const auto rows = hidden.size(0), vocabulary = weight.size(0);
    const at::Tensor all_inputs = hidden.to(type), factors = weight.to(type);
    const auto exact = type == at::kDouble ? at::kDouble : at::kFloat;
    const auto wide = hidden.options().dtype(exact);
    // The widest part of any rank, so that all ranks take the same blocks.
    const auto widest = part.group == nullptr ? vocabulary : part.most();
    const auto block = rows_at_once(all_inputs, widest);
    at::Tensor hidden_grad, weight_grad;
    if (wanted.hidden) hidden_grad = at::empty_like(all_inputs, at::MemoryFormat::Contiguous);
    if (wanted.weight) weight_grad = at::zeros(weight.sizes(), wide);
    auto losses = at::empty({rows}, wide);
    // One block's memory serves all blocks.
    const auto memory = at::empty({std::min(block, rows), vocabulary}, all_inputs.options());
    for (std::int64_t first = 0; first < rows; first += block) {
      const auto count = std::min(block, rows - first);
      const auto inputs = all_inputs.narrow(0, first, count);
      const auto block_targets = targets.narrow(0, first, count);
      auto logits = memory.narrow(0, 0, count);
      at::mm_out(logits, inputs, factors.t());
      losses.narrow(0, first, count)
          .copy_(part.group == nullptr ? block_losses(logits, block_targets, ignore_index, wanted)
                                       : split_block_losses(logits, block_targets, ignore_index,
                                                            wanted, part.begin, *part.group));
      if (!wanted.any()) continue;
      const auto slopes = logits.to(type);
      if (wanted.hidden) {
        auto to = hidden_grad.narrow(0, first, count);
        at::mm_out(to, slopes, factors);
      }
      if (wanted.weight) {
        // A sum over so many rows may exceed Half's range, whatever the loss scale is.
        if (type == exact || type == at::kHalf)
          weight_grad.addmm_(slopes.to(exact).t(), inputs.to(exact));
        else
          weight_grad.add_(at::mm(slopes.t(), inputs));
      }
    }
    context->save_for_backward({hidden_grad, weight_grad});
    context->saved_data["hidden_type"] = static_cast<std::int64_t>(hidden.scalar_type());
    context->saved_data["weight_type"] = static_cast<std::int64_t>(weight.scalar_type());
    // Adds in the order of rows, whatever the number of threads; on a GPU LibTorch's sum has an
    // order of its own.
    if (!losses.device().is_cpu()) return losses.sum(at::kDouble).to(exact);
    double sum = 0.0;
    const auto each = losses.to(at::kDouble);
    for (std::int64_t row = 0; row < rows; ++row) sum += each.data_ptr<double>()[row];
    return at::scalar_tensor(sum, wide);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    intercept::refuse_double_backward("linear_cross_entropy");
    const auto saved = context->get_saved_variables();
    const std::array types = {context->saved_data["hidden_type"].toInt(),
                              context->saved_data["weight_type"].toInt()};
    variable_list results(7);
    for (std::size_t i = 0; i < 2; ++i)
      // Multiplies in float, because 16 bits may not hold the factor.
      if (saved[i].defined())
        results[i] =
            (in_full_precision(saved[i]) * grads[0]).to(static_cast<at::ScalarType>(types[i]));
    return results;
  }
};

// Returns the type of the products. A function of ours sees tensors before autocast does, so it has
// to ask for autocast's type. On CPUs it does not, because LibTorch's products of 16 bits are slow
// there.
std::optional<at::ScalarType> autocast_of(const at::Tensor& hidden, const at::Tensor& weight) {
  // Autocast leaves doubles as they are.
  if (hidden.device().is_cpu() || hidden.scalar_type() == at::kDouble ||
      weight.scalar_type() == at::kDouble)
    return std::nullopt;
  return device::Autocast::active(hidden.device().type());
}

void check_operands(const char* function, const at::Tensor& hidden, const at::Tensor& weight,
                    const at::Tensor& targets) {
  if (hidden.dim() != 2 || weight.dim() != 2 || hidden.size(1) != weight.size(1))
    throw UsageError("{}: hidden has the shape [{}] and weight [{}]: they must be [rows, width] "
                     "and [vocabulary, width]",
                     function, fmt::join(hidden.sizes(), ", "), fmt::join(weight.sizes(), ", "));
  const bool one_type = hidden.scalar_type() == weight.scalar_type() || autocast_of(hidden, weight);
  if (!one_type || hidden.device() != weight.device() || hidden.device() != targets.device())
    throw UsageError("{}: hidden is {} on {}, weight {} on {}, targets on {}: the first two must "
                     "be of one type, and all on one device",
                     function, c10::toString(hidden.scalar_type()), hidden.device().str(),
                     c10::toString(weight.scalar_type()), weight.device().str(),
                     targets.device().str());
}

LossSum loss_of(const char* function, const at::Tensor& hidden, const at::Tensor& weight,
                const Targets& given, std::int64_t ignore_index, const Rows& part) {
  const at::Tensor& targets = given.tensor;
  check_operands(function, hidden, weight, targets);
  const auto vocabulary = part.group == nullptr ? weight.size(0) : part.vocabulary;
  const auto count = internal::count_targets(
      function, given,
      {.rows = hidden.size(0), .vocabulary = vocabulary, .ignore_index = ignore_index});
  const bool recorded = at::GradMode::is_enabled();
  const Wanted wanted{.hidden = recorded && hidden.requires_grad(),
                      .weight = recorded && weight.requires_grad()};
  return {
      LinearCrossEntropy::apply(hidden, weight, targets.contiguous(), ignore_index, wanted, part,
                                autocast_of(hidden, weight).value_or(hidden.scalar_type())),
      count};
}

}  // namespace

LossSum linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                             const Targets& targets, std::int64_t ignore_index) {
  return loss_of("linear_cross_entropy", hidden, weight, targets, ignore_index, {});
}

LossSum vocab_parallel_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                     const Targets& targets, const VocabularyPart& part,
                                     const std::shared_ptr<TensorAxis>& axis,
                                     std::int64_t ignore_index) {
  const auto mine = mesh::part_of(part.vocabulary, axis->rank(), axis->size());
  if (weight.dim() == 2 && (part.begin != mine.begin || weight.size(0) != mine.size()))
    throw UsageError("vocab_parallel_cross_entropy: rank {} of '{}' has {} rows of the weight from "
                     "{} on; of a vocabulary of {} its part is {} from {} on",
                     axis->rank(), axis->group()->name(), weight.size(0), part.begin,
                     part.vocabulary, mine.size(), mine.begin);
  return loss_of("vocab_parallel_cross_entropy", hidden, weight, targets, ignore_index,
                 {.begin = part.begin, .vocabulary = part.vocabulary, .group = axis->group()});
}

}  // namespace lockstep::nn
