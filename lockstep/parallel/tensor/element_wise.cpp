#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/WrapDimUtils.h>

#include <lockstep/nn/tensor_parallel/tensor_moves.h>
#include <lockstep/parallel/tensor/split_tensor.h>

namespace lockstep::tensor {

namespace {

bool is_written(const c10::OperatorHandle& op, std::size_t argument) {
  const auto* const alias = op.schema().arguments()[argument].alias_info();
  return alias != nullptr && alias->isWrite();
}

// How all tensors of a call are cut. Returns nothing where they are not cut alike, or where a
// tensor that every rank has whole has no part that fits, or is written to. Lists of tensors are
// left to the caller.
std::optional<Alignment> common_alignment(intercept::Call& call, const SplitOwner& owner) {
  const auto arguments = call.arguments();
  std::optional<Alignment> common;
  for (const c10::IValue& argument : arguments) {
    if (argument.isTensorList() || argument.isOptionalTensorList()) return {};
    const Split* const split = split_argument(argument, owner);
    if (split == nullptr) continue;
    const Alignment one = alignment_of(argument.toTensor(), split->cut);
    if (common && *common != one) return {};
    common = one;
  }
  if (!common) return {};
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (!arguments[i].isTensor() || split_argument(arguments[i], owner) != nullptr) continue;
    const at::Tensor& tensor = arguments[i].toTensor();
    if (!tensor.defined()) continue;
    if (is_written(call.op(), i) || !has_aligned_part(tensor, *common)) return {};
  }
  return common;
}

// The strides of the whole of `part`, taken from one of these tensors if its part has the same
// layout: a part with one element along the dim does not tell the strides of the whole.
at::OptionalIntArrayRef strides_of_one(const std::vector<at::Tensor>& tensors,
                                       const at::Tensor& part, std::int64_t dim) {
  if (part.size(dim) > 1) return {};
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor& other = split_of(tensor)->part;
    bool same = other.sizes() == part.sizes();
    for (std::int64_t i = 0; same && i < part.dim(); ++i)
      same = part.size(i) == 1 || part.stride(i) == other.stride(i);
    if (same) return tensor.strides();
  }
  return {};
}

// A new tensor with the size and the strides of the whole.
at::Tensor empty_whole(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), split_of(tensor)->part.options());
}

}  // namespace

Alignment alignment_of(const at::Tensor& whole, CutDim cut) {
  return {whole.dim() - 1 - cut.dim, whole.size(cut.dim), cut.blocks};
}

CutDim cut_of(const at::Tensor& whole, const Alignment& alignment) {
  return {whole.dim() - 1 - alignment.from_last, alignment.blocks};
}

bool has_aligned_part(const at::Tensor& tensor, const Alignment& alignment) {
  const std::int64_t dim = tensor.dim() - 1 - alignment.from_last;
  return dim < 0 || tensor.size(dim) == 1 || tensor.size(dim) == alignment.size;
}

at::Tensor aligned_part(const at::Tensor& tensor, const Alignment& alignment,
                        const nn::TensorAxis& axis) {
  const std::int64_t dim = tensor.dim() - 1 - alignment.from_last;
  if (dim >= 0 && tensor.size(dim) == alignment.size)
    return take_part(tensor, {dim, alignment.blocks}, axis);
  // All ranks use the same tensor, so its gradient is the sum of theirs.
  const bool recorded = tensor.requires_grad() && c10::GradMode::is_enabled();
  return recorded ? nn::enter_products(tensor, axis) : tensor;
}

namespace {

// Whether results have the strides that the same operator gives of whole tensors with the strides
// of its arguments.
enum class Layout : std::uint8_t { as_arguments, as_parts };

// Runs an operator on the parts of all its tensors. Its results are cut as they are, and have as
// many dims after the cut one.
bool run_aligned(intercept::Call& call, SplitOwner& owner, const Alignment& alignment,
                 Layout layout) {
  const auto arguments = arguments_of(call);
  std::vector<std::pair<at::Tensor, at::Tensor>> written;  // the tensor and its part
  std::vector<at::Tensor> cut;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (!arguments[i].isTensor() || !arguments[i].toTensor().defined()) continue;
    const at::Tensor tensor = arguments[i].toTensor();
    const Split* const split = split_argument(tensor, owner);
    if (split == nullptr) {
      arguments[i] = aligned_part(tensor, alignment, owner.axis());
      continue;
    }
    cut.push_back(tensor);
    if (is_written(call.op(), i)) {
      written.emplace_back(tensor, part_to_write(tensor));
      arguments[i] = written.back().second;
    } else {
      arguments[i] = part_to_read(tensor);
    }
  }
  call.op().callBoxed(&call.stack());
  for (const auto& [tensor, part] : written) was_written(tensor);
  const std::size_t num_results = call.op().schema().returns().size();
  for (c10::IValue& result : std::span(call.stack()).last(num_results)) {
    const at::Tensor part = result.toTensor();
    at::Tensor tensor;
    for (const auto& [whole, mine] : written)
      if (mine.is_same(part)) tensor = whole;
    if (!tensor.defined()) {
      const CutDim result_cut = cut_of(part, alignment);
      tensor =
          make_split_like(*split_of(cut.front()), part, result_cut,
                          layout == Layout::as_arguments ? strides_of_one(cut, part, result_cut.dim)
                                                         : at::OptionalIntArrayRef());
    }
    result = tensor;
  }
  return true;
}

}  // namespace

bool run_element_wise(intercept::Call& call, SplitOwner& owner) {
  // where(condition) returns places, not a tensor.
  for (const c10::Argument& result : call.op().schema().returns())
    if (result.type()->kind() != c10::TypeKind::TensorType) return false;
  const auto alignment = common_alignment(call, owner);
  return alignment && run_aligned(call, owner, *alignment, Layout::as_arguments);
}

// Products of matrices, and attention, of which each rank has some of the batch: heads, say. Each
// rank computes its own.
bool run_batched(intercept::Call& call, SplitOwner& owner) {
  for (const c10::IValue& argument : call.arguments())
    if (argument.isTensor() && argument.toTensor().defined() && argument.toTensor().dim() < 2)
      return false;
  const auto alignment = common_alignment(call, owner);
  return alignment && alignment->from_last >= 2 &&
         run_aligned(call, owner, *alignment, Layout::as_parts);
}

// scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, …). With dropout, each rank
// would draw numbers for its part alone.
bool run_attention(intercept::Call& call, SplitOwner& owner) {
  return call.arguments()[4].toDouble() == 0 && run_batched(call, owner);
}

// cat(tensors, dim) along another dim than the one that is cut.
bool run_joined(intercept::Call& call, SplitOwner& owner) {
  if (!call.arguments()[0].isTensorList() || !call.arguments()[1].isInt()) return false;
  const std::vector<at::Tensor> tensors = call.arguments()[0].toTensorVector();
  const auto first = std::ranges::find_if(
      tensors, [&](const at::Tensor& one) { return split_argument(one, owner) != nullptr; });
  const Split& split = *split_of(*first);
  const std::int64_t size = first->size(split.cut.dim);
  if (at::maybe_wrap_dim(call.arguments()[1].toInt(), first->dim()) == split.cut.dim) return false;
  for (const at::Tensor& one : tensors) {
    const Split* const other = split_argument(one, owner);
    if (one.dim() != first->dim() || one.size(split.cut.dim) != size ||
        (other != nullptr && other->cut != split.cut))
      return false;
  }
  std::vector<at::Tensor> parts;
  for (const at::Tensor& one : tensors)
    parts.push_back(split_argument(one, owner) != nullptr
                        ? part_to_read(one)
                        : take_part(one, split.cut, owner.axis()));
  return_instead(call,
                 make_split_like(split, at::cat(parts, call.arguments()[1].toInt()), split.cut));
  return true;
}

// new_empty(self, size, …), new_empty_strided(self, size, stride, …) and others. A result of other
// sizes is whole.
bool run_make_alike(intercept::Call& call, SplitOwner& owner) {
  const auto arguments = arguments_of(call);
  const Split* const split = split_argument(arguments[0], owner);
  if (split == nullptr || !arguments[1].isIntList()) return false;
  const at::Tensor tensor = arguments[0].toTensor();
  if (arguments[1].toIntVector() != tensor.sizes().vec()) {
    arguments[0] = split->part;
    call.op().callBoxed(&call.stack());
    return true;
  }
  if (call.op().operator_name().name == "aten::new_empty_strided") {
    if (!arguments[2].isIntList()) return false;
    arguments[2] = part_strides(arguments[2].toIntVector(), split->cut.dim, owner.axis().size());
  }
  arguments[0] = split->part;
  arguments[1] = split->part.sizes().vec();
  call.op().callBoxed(&call.stack());
  call.stack().back() = make_split_like(*split, call.stack().back().toTensor(), split->cut);
  return true;
}

// All numbers of the whole are drawn, so that this rank's numbers are those of a single rank, and
// the generators of all ranks stay alike.
bool run_draw(intercept::Call& call, SplitOwner& owner) {
  const auto arguments = arguments_of(call);
  const Split* const split = split_argument(arguments[0], owner);
  if (split == nullptr) return false;
  for (const c10::IValue& argument : arguments.subspan(1))
    if (argument.isTensor()) return false;
  const at::Tensor tensor = arguments[0].toTensor();
  const at::Tensor part = part_to_write(tensor);
  const at::Tensor whole = empty_whole(tensor);
  arguments[0] = whole;
  call.op().callBoxed(&call.stack());
  part.copy_(own_part(whole, split->cut, owner.axis()));
  was_written(tensor);
  call.stack().back() = tensor;
  return true;
}

// dropout(input, p, train) and dropout_.
bool run_dropout(intercept::Call& call, SplitOwner& owner) {
  const auto arguments = call.arguments();
  const at::Tensor tensor = arguments[0].toTensor();
  const Split* const split = split_argument(arguments[0], owner);
  if (split == nullptr) return false;
  const bool in_place = is_written(call.op(), 0);
  const double share = arguments[1].toDouble();
  if (!arguments[2].toBool()) {
    return_instead(call, tensor);
    return true;
  }
  at::Tensor factors;
  {
    const c10::NoGradGuard no_grad;
    factors =
        own_part(at::dropout(empty_whole(tensor).fill_(1), share, true), split->cut, owner.axis());
  }
  if (in_place) {
    part_to_write(tensor).mul_(factors);
    was_written(tensor);
    return_instead(call, tensor);
  } else {
    const at::Tensor part = part_to_read(tensor).mul(factors);
    return_instead(call, make_split_like(*split, part, split->cut,
                                         strides_of_one({tensor}, part, split->cut.dim)));
  }
  return true;
}

// norm(self, p) with p = 2, which clipping calls.
bool run_norm(intercept::Call& call, SplitOwner& owner) {
  const auto arguments = call.arguments();
  const Split* const split = split_argument(arguments[0], owner);
  if (split == nullptr || arguments.size() != 2 || !arguments[1].isScalar() ||
      arguments[1].toScalar().toDouble() != 2)
    return false;
  const at::Tensor& tensor = arguments[0].toTensor();
  const at::Tensor& part = split->part;
  const bool recorded = tensor.requires_grad() || part.requires_grad();
  if ((recorded && c10::GradMode::is_enabled()) || !part.is_floating_point()) return false;
  const c10::NoGradGuard no_grad;
  const at::Tensor sum = part.norm().square();
  owner.axis().group()->all_reduce(sum).wait();
  return_instead(call, sum.sqrt());
  return true;
}

}  // namespace lockstep::tensor
