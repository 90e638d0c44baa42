#include <lockstep/nn/tensor_parallel/tensor_moves.h>

#include <vector>

#include <ATen/ATen.h>
#include <spdlog/fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>

#include <lockstep/base/error.h>
#include <lockstep/nn/tensor_parallel/communicator_capsule.h>

namespace lockstep::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr std::int64_t kPositions = 1;

enum class Move : std::int64_t {
  keep,          // leave it as it is
  sum,           // the sum of all ranks' tensors
  gather,        // all ranks' parts along a dim
  take,          // this rank's part along a dim
  sum_and_take,  // this rank's part of the sum
};

std::int64_t part_size(const at::Tensor& x, std::int64_t dim, const comm::Communicator& group) {
  const std::int64_t size = x.size(dim);
  if (size % group.size() != 0)
    throw UsageError("dim {} of a tensor of shape [{}] cannot be cut over the {} ranks of '{}': {} "
                     "is no multiple of {}",
                     dim, fmt::join(x.sizes(), ", "), group.size(), group.name(), size,
                     group.size());
  return size / group.size();
}

void check_positions(const at::Tensor& x, const TensorAxis& axis) {
  if (x.dim() < 3)
    throw UsageError("a tensor of shape [{}] has no positions that the {} ranks of '{}' could have "
                     "slices of: with sequence parallelism give [batch, length, …]",
                     fmt::join(x.sizes(), ", "), axis.size(), axis.group()->name());
}

// Turns [ranks, …, size, …] into [..., ranks · size, …], with the ranks' parts one after the other
// along `dim`.
at::Tensor joined(const at::Tensor& parts, std::int64_t dim) {
  return parts.movedim(0, dim).flatten(dim, dim + 1);
}

// The inverse of joined(); contiguous.
at::Tensor separated(const at::Tensor& x, std::int64_t dim, int num_parts) {
  return x.unflatten(dim, {num_parts, -1}).movedim(dim, 0).contiguous();
}

// Ranks with different shapes may have equally many elements, so their calls also compare the size
// of the dim that is cut.
comm::CallOptions of_parts(std::int64_t size) {
  return {.subject = static_cast<std::int32_t>(size & 0x7fffffff)};
}

// Waits for such a call. If ranks differ, the error says what that number is.
void wait_for_parts(comm::Work& work) {
  try {
    work.wait();
  } catch (const CommError& error) {
    if (error.fault() != Fault::mismatch) throw;
    auto details = error.details();
    details.explanation = comm::name_subjects(
        std::move(details.explanation),
        [](std::int32_t size) { return fmt::format("{} along the dim that is cut", size); });
    throw CommError(std::move(details));
  }
}

at::Tensor gathered(const at::Tensor& x, std::int64_t dim, comm::Communicator& group) {
  const at::Tensor mine = x.contiguous();
  std::vector<std::int64_t> shape = mine.sizes().vec();
  shape.insert(shape.begin(), group.size());
  const at::Tensor parts = at::empty(shape, mine.options());
  comm::Work work = group.all_gather(parts, mine, of_parts(mine.size(dim)));
  wait_for_parts(work);
  return joined(parts, dim);
}

// Returns a tensor of its own, which shares no memory with the input.
at::Tensor moved(Move move, const at::Tensor& x, std::int64_t dim, comm::Communicator& group) {
  switch (move) {
    case Move::keep: return x;
    case Move::sum: {
      at::Tensor sum = x.clone(at::MemoryFormat::Contiguous);
      group.all_reduce(sum).wait();
      return sum;
    }
    case Move::gather: return gathered(x, dim, group);
    case Move::take: {
      const std::int64_t size = part_size(x, dim, group);
      return x.narrow(dim, group.rank() * size, size).clone(at::MemoryFormat::Contiguous);
    }
    case Move::sum_and_take: {
      const std::int64_t size = part_size(x, dim, group);
      const at::Tensor parts = separated(x, dim, group.size());
      at::Tensor mine = at::empty(parts.sizes().slice(1), parts.options());
      comm::Work work = group.reduce_scatter(mine, parts, comm::ReduceOp::sum, of_parts(size));
      wait_for_parts(work);
      return mine;
    }
  }
  LOCKSTEP_CHECK(false, "a move without a name");
}

// Backward is the same function with the two moves exchanged, so it has derivatives of every order.
class MovedBothWays : public torch::autograd::Function<MovedBothWays> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const std::shared_ptr<comm::Communicator>& group, std::int64_t dim,
                            Move there, Move back) {
    context->saved_data["group"] = internal::kept(group);
    context->saved_data["dim"] = dim;
    context->saved_data["there"] = static_cast<std::int64_t>(there);
    context->saved_data["back"] = static_cast<std::int64_t>(back);
    return moved(there, x, dim, *group);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    auto& data = context->saved_data;
    return {MovedBothWays::apply(gradients.at(0), internal::kept_group(data["group"]),
                                 data["dim"].toInt(), static_cast<Move>(data["back"].toInt()),
                                 static_cast<Move>(data["there"].toInt())),
            {},
            {},
            {},
            {}};
  }
};

at::Tensor move_both_ways(const at::Tensor& x, const TensorAxis& axis, std::int64_t dim, Move there,
                          Move back) {
  if (axis.size() == 1) return x;
  return MovedBothWays::apply(x, axis.group(), dim, there, back);
}

// Parts may have different widths, such as those of a vocabulary.
class GatheredFeatures : public torch::autograd::Function<GatheredFeatures> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const std::shared_ptr<comm::Communicator>& group) {
    const at::Tensor widths = at::empty({group->size()}, at::kLong);
    const at::Tensor mine = at::full({1}, x.size(-1), at::kLong);
    group->all_gather(widths, mine).wait();
    std::vector<at::Tensor> parts;
    std::int64_t first = 0;
    for (int rank = 0; rank < group->size(); ++rank) {
      std::vector<std::int64_t> shape = x.sizes().vec();
      shape.back() = widths[rank].item<std::int64_t>();
      if (rank < group->rank()) first += shape.back();
      parts.push_back(at::empty(shape, x.options()));
    }
    group->all_gather(parts, x.contiguous()).wait();
    context->saved_data["first"] = first;
    context->saved_data["width"] = x.size(-1);
    return at::cat(parts, -1);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    auto& data = context->saved_data;
    return {gradients.at(0).narrow(-1, data["first"].toInt(), data["width"].toInt()), {}};
  }
};

}  // namespace

at::Tensor enter_products(const at::Tensor& x, const TensorAxis& axis) {
  if (!axis.by_positions()) return move_both_ways(x, axis, kPositions, Move::keep, Move::sum);
  check_positions(x, axis);
  return move_both_ways(x, axis, kPositions, Move::gather, Move::sum_and_take);
}

at::Tensor leave_products(const at::Tensor& x, const TensorAxis& axis) {
  if (!axis.by_positions()) return move_both_ways(x, axis, kPositions, Move::sum, Move::keep);
  check_positions(x, axis);
  return move_both_ways(x, axis, kPositions, Move::sum_and_take, Move::gather);
}

at::Tensor gather_features(const at::Tensor& x, const TensorAxis& axis) {
  if (axis.size() == 1) return x;
  return GatheredFeatures::apply(x, axis.group());
}

at::Tensor take_features(const at::Tensor& x, const TensorAxis& axis) {
  return take_part(x, x.dim() - 1, axis);
}

at::Tensor gather_parts(const at::Tensor& x, std::int64_t dim, const TensorAxis& axis) {
  return move_both_ways(x, axis, dim, Move::gather, Move::take);
}

at::Tensor take_part(const at::Tensor& x, std::int64_t dim, const TensorAxis& axis) {
  return move_both_ways(x, axis, dim, Move::take, Move::gather);
}

void sum_gradients_over(const at::Tensor& parameter, std::shared_ptr<comm::Communicator> group) {
  if (group->size() == 1) return;
  // A frozen parameter may be thawed later. It accepts a hook only while it is not frozen, but
  // keeps it afterwards.
  const bool frozen = !parameter.requires_grad();
  if (frozen) parameter.requires_grad_(true);
  parameter.register_hook([group = std::move(group)](const at::Tensor& gradient) {
    const c10::NoGradGuard no_grad;
    return moved(Move::sum, gradient, 0, *group);
  });
  if (frozen) parameter.requires_grad_(false);
}

namespace internal {

at::Tensor Moving::wait() {
  wait_for_parts(work_);
  return std::move(result_);
}

Moving start_sum(at::Tensor partial, const TensorAxis& axis) {
  comm::Communicator& group = *axis.group();
  if (!axis.by_positions()) {
    comm::Work work = group.all_reduce(partial);
    return {std::move(partial), std::move(work)};
  }
  const std::int64_t size = part_size(partial, kPositions, group);
  const at::Tensor parts = separated(partial, kPositions, group.size());
  at::Tensor mine = at::empty(parts.sizes().slice(1), parts.options());
  comm::Work work = group.reduce_scatter(mine, parts, comm::ReduceOp::sum, of_parts(size));
  return {std::move(mine), std::move(work)};
}

GatheringPositions::GatheringPositions(const at::Tensor& slice, const TensorAxis& axis) {
  check_positions(slice, axis);
  const at::Tensor mine = slice.contiguous();
  std::vector<std::int64_t> shape = mine.sizes().vec();
  shape.insert(shape.begin(), axis.size());
  parts_ = at::empty(shape, mine.options());
  work_ = axis.group()->all_gather(parts_, mine, of_parts(mine.size(kPositions)));
}

at::Tensor GatheringPositions::wait() {
  wait_for_parts(work_);
  return joined(parts_, kPositions);
}

}  // namespace internal

}  // namespace lockstep::nn
