// Operators that put the elements along a dim together: sums, softmax, and losses over classes.
// Ranks exchange a few numbers for each row instead of the row if the dim is cut.
#include <algorithm>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/WrapDimUtils.h>

#include <lockstep/base/error.h>
#include <lockstep/nn/tensor_parallel/tensor_moves.h>
#include <lockstep/parallel/tensor/split_tensor.h>

namespace lockstep::tensor {

namespace {

// The dims that sum and mean go along; all of them where the call names none.
std::vector<std::int64_t> dims_of_sum(std::span<const c10::IValue> arguments,
                                      std::int64_t num_dims) {
  std::vector<std::int64_t> dims;
  if (arguments.size() > 2 && arguments[1].isIntList()) dims = arguments[1].toIntVector();
  for (std::int64_t& dim : dims) dim = at::maybe_wrap_dim(dim, num_dims);
  if (!dims.empty()) return dims;
  dims.resize(static_cast<std::size_t>(num_dims));
  std::iota(dims.begin(), dims.end(), 0);
  return dims;
}

// Whether these are the weights of a MultiheadAttention, [batch, heads, …], which it adds up over
// the heads even where nobody asks for them.
bool are_weights_of_heads(const Split& split, const at::Tensor& whole) {
  return whole.dim() == 4 && split.cut == CutDim{1} && split.source->ends_with("_proj_weight");
}

// The largest element of each row, of all ranks' parts; autograd does not follow.
at::Tensor largest_of_rows(const at::Tensor& part, std::int64_t dim, const nn::TensorAxis& axis) {
  const c10::NoGradGuard no_grad;
  const at::Tensor largest = part.detach().amax(dim, /*keepdim=*/true).contiguous();
  axis.group()->all_reduce(largest, comm::ReduceOp::max).wait();
  return largest;
}

// The type that LibTorch computes a softmax in and returns, under autocast, too.
at::ScalarType type_of_softmax(const at::Tensor& part) {
  return at::log_softmax(at::zeros({1}, part.options()), 0).scalar_type();
}

// Numbers of 16 bits are too few for sums over many classes.
at::Tensor with_room_for_sums(const at::Tensor& part) {
  const bool is_short = part.scalar_type() == at::kHalf || part.scalar_type() == at::kBFloat16;
  return is_short ? part.to(at::kFloat) : part;
}

}  // namespace

// sum(self, dtype), sum(self, dim, keepdim, dtype), and mean.
bool run_sum(intercept::Call& call, SplitOwner& owner) {
  const auto arguments = call.arguments();
  const at::Tensor whole = arguments[0].toTensor();
  const Split* const split = split_argument(arguments[0], owner);
  if (split == nullptr || !split->part.is_floating_point()) return false;
  if (arguments.size() > 2 && !arguments[1].isIntList() && !arguments[1].isNone()) return false;
  const std::vector<std::int64_t> dims = dims_of_sum(arguments, whole.dim());
  const CutDim cut = split->cut;
  torch::jit::Stack stack(arguments.begin(), arguments.end());
  stack[0] = part_to_read(whole);
  call.op().callBoxed(&stack);
  const at::Tensor of_part = stack.back().toTensor();
  if (std::ranges::count(dims, cut.dim) == 0) {
    const bool keeps = arguments[2].toBool();
    const auto before =
        std::ranges::count_if(dims, [&](std::int64_t dim) { return dim < cut.dim; });
    return_instead(call,
                   make_split_like(*split, of_part, {cut.dim - (keeps ? 0 : before), cut.blocks}));
    return true;
  }
  const bool is_mean = call.op().operator_name().name == "aten::mean";
  if (!is_mean && dims == std::vector{cut.dim} && are_weights_of_heads(*split, whole)) {
    return_instead(
        call,
        make_split(
            {.owner = split->owner, .part = of_part, .source = split->source, .is_sum = true}));
    return true;
  }
  const at::Tensor sum = nn::leave_products(of_part, owner.axis());
  return_instead(call, is_mean ? at::div(sum, owner.axis().size()) : sum);
  return true;
}

// softmax(self, dim, dtype) and log_softmax.
bool run_softmax(intercept::Call& call, SplitOwner& owner) {
  const auto arguments = call.arguments();
  const at::Tensor whole = arguments[0].toTensor();
  const Split* const split = split_argument(arguments[0], owner);
  if (split == nullptr || !arguments[1].isInt() || !split->part.is_floating_point()) return false;
  const std::int64_t dim = at::maybe_wrap_dim(arguments[1].toInt(), whole.dim());
  const CutDim cut = split->cut;
  if (dim != cut.dim) {
    torch::jit::Stack stack(arguments.begin(), arguments.end());
    stack[0] = part_to_read(whole);
    call.op().callBoxed(&stack);
    return_instead(call, make_split_like(*split, stack.back().toTensor(), cut));
    return true;
  }
  at::Tensor part = part_to_read(whole);
  if (!arguments[2].isNone()) part = part.to(arguments[2].toScalarType());
  const at::ScalarType type = type_of_softmax(part);
  part = with_room_for_sums(part);
  const nn::TensorAxis& axis = owner.axis();
  const at::Tensor shifted = part - largest_of_rows(part, dim, axis);
  const at::Tensor powers = shifted.exp();
  // Every rank uses the sums for its part, so their gradient is the sum of theirs.
  const at::Tensor sums =
      nn::enter_products(nn::leave_products(powers.sum(dim, /*keepdim=*/true), axis), axis);
  const bool of_logarithms = call.op().operator_name().name == "aten::log_softmax";
  const at::Tensor result = of_logarithms ? shifted - sums.log() : powers / sums;
  return_instead(call, make_split_like(*split, result.to(type), cut));
  return true;
}

namespace {

// A loss of scores [rows, classes, …], or [classes], for one class in each row.
struct ClassLoss {
  at::Tensor target;  // [rows, …]
  at::Tensor weight;  // [classes]; may be undefined
  std::int64_t reduction = at::Reduction::Mean;
  std::int64_t ignored = -100;
};

void check_targets(const at::Tensor& counted, std::int64_t num_classes, const std::string& source) {
  if (!counted.is_cpu())
    return at::_assert_async(counted.ge(0).logical_and(counted.lt(num_classes)).all());
  if (counted.numel() == 0) return;
  const auto least = counted.min().item<std::int64_t>(), most = counted.max().item<std::int64_t>();
  if (least < 0 || most >= num_classes)
    throw UsageError("a target is out of range: '{}' gives scores of {} classes, and the targets "
                     "are from {} to {}",
                     source, num_classes, least, most);
}

// The loss from this rank's part of the scores, on every rank. `are_logarithms`: of probabilities,
// as log_softmax gives them. Otherwise a row takes three numbers from each rank: its largest score,
// the sum of its powers, and the score of its class, which one rank has.
at::Tensor loss_of(const at::Tensor& given, const Split& split, const ClassLoss& loss,
                   bool are_logarithms) {
  const nn::TensorAxis& axis = split.owner->axis();
  const at::Tensor scores = with_room_for_sums(given);
  const std::int64_t dim = split.cut.dim, classes = scores.size(dim);
  const std::int64_t first = axis.rank() * classes;
  const at::Tensor counts = loss.target.ne(loss.ignored);
  const at::Tensor target = loss.target.masked_fill(counts.logical_not(), 0);
  check_targets(target, classes * axis.size(), *split.source);
  const at::Tensor here =
      counts.logical_and(target.ge(first)).logical_and(target.lt(first + classes));
  const at::Tensor place = (target - first).masked_fill(here.logical_not(), 0);
  const at::Tensor picked =
      scores.gather(dim, place.unsqueeze(dim)).squeeze(dim).masked_fill(here.logical_not(), 0);
  at::Tensor of_rows;
  if (are_logarithms) {
    of_rows = -nn::leave_products(picked, axis);
  } else {
    const at::Tensor largest = largest_of_rows(scores, dim, axis);
    const at::Tensor powers = (scores - largest).exp().sum(dim);
    const at::Tensor sums = nn::leave_products(at::stack({powers, picked}), axis);
    of_rows = sums[0].log() + largest.squeeze(dim) - sums[1];
  }
  of_rows = of_rows.masked_fill(counts.logical_not(), 0);
  at::Tensor weights = counts;
  if (loss.weight.defined()) {
    weights = loss.weight.index_select(0, target.flatten())
                  .view(target.sizes())
                  .masked_fill(counts.logical_not(), 0);
    of_rows = of_rows * weights;
  }
  if (loss.reduction == at::Reduction::None) return of_rows;
  return loss.reduction == at::Reduction::Sum ? of_rows.sum() : of_rows.sum() / weights.sum();
}

}  // namespace

// cross_entropy_loss(self, target, weight, reduction, ignore_index, label_smoothing), and nll_loss
// of each kind, which end at ignore_index.
bool run_class_loss(intercept::Call& call, SplitOwner& owner) {
  const auto arguments = call.arguments();
  const Split* const split = split_argument(arguments[0], owner);
  const at::Tensor whole = arguments[0].toTensor();
  const at::Tensor target = arguments[1].toTensor();
  const bool of_scores = call.op().operator_name().name == "aten::cross_entropy_loss";
  const bool smooths = of_scores && arguments[5].toDouble() != 0;
  const CutDim classes{whole.dim() == 1 ? 0 : 1};
  const bool by_class = split != nullptr && split->cut == classes &&
                        split_argument(target, owner) == nullptr &&
                        at::isIntegralType(target.scalar_type(), /*includeBool=*/false) &&
                        target.dim() == std::max<std::int64_t>(whole.dim() - 1, 0) &&
                        target.numel() * whole.size(classes.dim) == whole.numel();
  if (!by_class || smooths) {
    // LibTorch makes it of log_softmax, sums and nll_loss, which come here one by one.
    if (of_scores) call.decompose();
    return of_scores;
  }
  const at::Tensor weight = arguments[2].isTensor() ? arguments[2].toTensor() : at::Tensor();
  const at::Tensor part = part_to_read(whole);
  const ClassLoss loss{target, weight, arguments[3].toInt(), arguments[4].toInt()};
  const at::ScalarType type = of_scores ? type_of_softmax(part) : part.scalar_type();
  return_instead(call, loss_of(part, *split, loss, !of_scores).to(type));
  return true;
}

}  // namespace lockstep::tensor
