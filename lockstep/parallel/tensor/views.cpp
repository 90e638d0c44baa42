#include <algorithm>
#include <functional>
#include <numeric>
#include <string>
#include <unordered_map>

#include <ATen/ATen.h>
#include <ATen/WrapDimUtils.h>

#include <lockstep/parallel/tensor/split_tensor.h>

namespace lockstep::tensor {

namespace {

using Sizes = std::vector<std::int64_t>;

// A view of a part, and how the view of the whole is cut.
struct PartView {
  at::Tensor part;
  CutDim cut;
};

// A view operator that was called on one cut tensor.
struct ViewCall {
  const at::Tensor& whole;
  const Split& split;
  std::span<const c10::IValue> arguments;
  int parts;

  at::Tensor part() const { return part_to_read(whole); }
  // With another dim, and as many blocks.
  CutDim cut_at(std::int64_t dim) const { return {dim, split.cut.blocks}; }
  std::int64_t dim_argument(std::size_t index) const {
    return at::maybe_wrap_dim(arguments[index].toInt(), whole.dim());
  }
};

std::int64_t elements(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

// How a view with these sizes is cut. In row-major order the whole is some number of blocks, each
// of which has a part of each rank. The view is cut along the dim that these parts lie in, if it
// has them in one piece: dims before it count blocks, and so may it, as one of samples and heads
// does.
std::optional<CutDim> cut_in_view(const Sizes& sizes, const ViewCall& call) {
  const CutDim& cut = call.split.cut;
  const auto blocks = elements(call.whole.sizes().slice(0, cut.dim).vec()) * cut.blocks;
  std::int64_t before = 1;
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    if (before * sizes[dim] > blocks) {
      if (blocks % before != 0 || sizes[dim] % (blocks / before * call.parts) != 0) return {};
      return CutDim{static_cast<std::int64_t>(dim), blocks / before};
    }
    before *= sizes[dim];
  }
  return {};
}

// view, _unsafe_view, reshape(self, size), _reshape_alias(self, size, stride)
std::optional<PartView> reshaped(const ViewCall& call) {
  if (!call.arguments[1].isIntList() || call.whole.numel() == 0) return {};
  Sizes sizes = call.arguments[1].toIntVector();
  const auto rest = std::ranges::find(sizes, -1);
  if (rest != sizes.end()) {
    *rest = 1;
    const std::int64_t known = elements(sizes);
    if (known <= 0 || call.whole.numel() % known != 0) return {};
    *rest = call.whole.numel() / known;
  }
  if (elements(sizes) != call.whole.numel()) return {};
  const auto cut = cut_in_view(sizes, call);
  if (!cut) return {};
  sizes[static_cast<std::size_t>(cut->dim)] /= call.parts;
  return PartView{call.part().reshape(sizes), *cut};
}

std::optional<PartView> transposed(const ViewCall& call) {
  const std::int64_t first = call.dim_argument(1), second = call.dim_argument(2);
  const std::int64_t dim = call.split.cut.dim;
  return PartView{call.part().transpose(first, second), call.cut_at(dim == first    ? second
                                                                    : dim == second ? first
                                                                                    : dim)};
}

std::optional<PartView> turned(const ViewCall& call) {  // t(self)
  const std::int64_t dim = call.split.cut.dim;
  return PartView{call.part().t(), call.cut_at(call.whole.dim() == 2 ? 1 - dim : dim)};
}

std::optional<PartView> permuted(const ViewCall& call) {
  const Sizes dims = call.arguments[1].toIntVector();
  for (std::size_t i = 0; i < dims.size(); ++i)
    if (at::maybe_wrap_dim(dims[i], call.whole.dim()) == call.split.cut.dim)
      return PartView{call.part().permute(dims), call.cut_at(static_cast<std::int64_t>(i))};
  return {};
}

std::optional<PartView> unsqueezed(const ViewCall& call) {
  const std::int64_t at = at::maybe_wrap_dim(call.arguments[1].toInt(), call.whole.dim() + 1);
  const std::int64_t dim = call.split.cut.dim;
  return PartView{call.part().unsqueeze(at), call.cut_at(dim + (at <= dim ? 1 : 0))};
}

// squeeze(self), squeeze(self, dim). The sizes of the whole decide: a part may have one element
// where the whole has several.
std::optional<PartView> squeezed(const ViewCall& call) {
  if (call.arguments.size() > 1 && !call.arguments[1].isInt()) return {};
  PartView view{call.part(), call.split.cut};
  // The result is a new tensor even if no dim is removed.
  view.part = view.part.view(view.part.sizes());
  for (std::int64_t dim = call.whole.dim() - 1; dim >= 0; --dim) {
    const bool asked = call.arguments.size() == 1 || call.dim_argument(1) == dim;
    if (!asked || call.whole.size(dim) != 1) continue;
    view.part = view.part.squeeze(dim);
    if (dim < view.cut.dim) --view.cut.dim;
  }
  return view;
}

std::optional<PartView> expanded(const ViewCall& call) {  // expand(self, size, implicit)
  if (!call.arguments[1].isIntList()) return {};
  Sizes sizes = call.arguments[1].toIntVector();
  const auto more = static_cast<std::int64_t>(sizes.size()) - call.whole.dim();
  if (more < 0) return {};
  const std::int64_t dim = call.split.cut.dim + more;
  std::int64_t& size = sizes[static_cast<std::size_t>(dim)];
  if (size != -1 && size != call.whole.size(call.split.cut.dim)) return {};
  size = -1;
  return PartView{call.part().expand(sizes), call.cut_at(dim)};
}

// repeat(self, repeats), which is a copy. Along the cut dim it repeats all blocks.
std::optional<PartView> repeated(const ViewCall& call) {
  const Sizes times = call.arguments[1].toIntVector();
  const auto more = static_cast<std::int64_t>(times.size()) - call.whole.dim();
  if (more < 0 || elements(times) == 0) return {};
  const std::int64_t dim = call.split.cut.dim + more;
  return PartView{call.part().repeat(times),
                  {dim, call.split.cut.blocks * times[static_cast<std::size_t>(dim)]}};
}

std::optional<PartView> aliased(const ViewCall& call) {
  return PartView{call.part().alias(), call.split.cut};
}

std::optional<PartView> detached(const ViewCall& call) {
  return PartView{call.split.part.detach(), call.split.cut};
}

const std::unordered_map<std::string, std::optional<PartView> (*)(const ViewCall&)>& one_to_one() {
  static const std::unordered_map<std::string, std::optional<PartView> (*)(const ViewCall&)> views =
      {{"aten::view", reshaped},        {"aten::_unsafe_view", reshaped},
       {"aten::reshape", reshaped},     {"aten::_reshape_alias", reshaped},
       {"aten::transpose", transposed}, {"aten::t", turned},
       {"aten::permute", permuted},     {"aten::unsqueeze", unsqueezed},
       {"aten::squeeze", squeezed},     {"aten::expand", expanded},
       {"aten::repeat", repeated},      {"aten::alias", aliased},
       {"aten::detach", detached}};
  return views;
}

// Which argument of these is the dim that they go along; negative for other views.
int place_of_dim(const std::string& op) {
  if (op == "aten::select" || op == "aten::slice" || op == "aten::unbind") return 1;
  if (op == "aten::split" || op == "aten::split_with_sizes") return 2;
  return -1;
}

// The same view or views of a tensor with the whole's sizes and strides and without memory.
std::vector<at::Tensor> views_without_memory(const intercept::Call& call,
                                             std::span<const c10::IValue> arguments,
                                             const at::Tensor& whole) {
  torch::jit::Stack stack(arguments.begin(), arguments.end());
  stack[0] = at::empty_strided(whole.sizes(), whole.strides(),
                               at::TensorOptions().dtype(whole.scalar_type()).device(at::kMeta));
  call.op().callBoxed(&stack);
  if (stack.back().isTensor()) return {stack.back().toTensor()};
  return stack.back().toTensorVector();
}

// Changes the arguments of slice, split and split_with_sizes along the cut dim to those that do to
// a part what they do to the whole. False where a result would not be made of whole blocks.
bool cut_into_blocks(const std::string& op, std::span<c10::IValue> arguments,
                     const at::Tensor& whole, const Split& split, int parts) {
  const std::int64_t size = whole.size(split.cut.dim);
  const std::int64_t block = size / split.cut.blocks;
  const auto of_part = [&](c10::IValue& argument, std::int64_t at) {
    argument = at / parts;
    return at % block == 0;
  };
  if (op == "aten::slice") {
    const auto place = [&](const c10::IValue& argument, std::int64_t otherwise) {
      const std::int64_t at = argument.isInt() ? argument.toInt() : otherwise;
      return std::clamp<std::int64_t>(at < 0 ? at + size : at, 0, size);
    };
    const std::int64_t begin = place(arguments[2], 0), end = place(arguments[3], size);
    return begin < end && arguments[4].isInt() && arguments[4].toInt() == 1 &&
           of_part(arguments[2], begin) && of_part(arguments[3], end);
  }
  if (op == "aten::split")
    return arguments[1].isInt() && arguments[1].toInt() > 0 &&
           of_part(arguments[1], arguments[1].toInt());
  if (op != "aten::split_with_sizes" || !arguments[1].isIntList()) return false;
  Sizes sizes = arguments[1].toIntVector();
  for (std::int64_t& one : sizes) {
    if (one <= 0 || one % block != 0) return false;
    one /= parts;
  }
  arguments[1] = sizes;
  return true;
}

// select, slice, unbind, split, split_with_sizes along another dim than the one that is cut, or
// into whole blocks of it.
bool run_along_dim(intercept::Call& call, const Split& split, int place) {
  const auto arguments = call.arguments();
  const at::Tensor whole = arguments[0].toTensor();
  const auto at_place = static_cast<std::size_t>(place);
  if (arguments.size() <= at_place || !arguments[at_place].isInt()) return false;
  const std::int64_t along = at::maybe_wrap_dim(arguments[at_place].toInt(), whole.dim());
  const std::string& op = call.op().operator_name().name;
  const CutDim& cut = split.cut;
  torch::jit::Stack of_part(arguments.begin(), arguments.end());
  if (along == cut.dim && !cut_into_blocks(op, of_part, whole, split, split.owner->axis().size()))
    return false;
  const bool drops = op == "aten::select" || op == "aten::unbind";
  const std::int64_t dim = cut.dim - (drops && along < cut.dim ? 1 : 0);
  const auto of_whole = views_without_memory(call, arguments, whole);
  of_part[0] = part_to_read(whole);
  call.op().callBoxed(&of_part);
  const auto view_of = [&](const at::Tensor& part, const at::Tensor& same_of_whole) {
    const std::int64_t blocks =
        along == cut.dim ? same_of_whole.size(dim) * cut.blocks / whole.size(dim) : cut.blocks;
    return make_split_like(split, part, {dim, blocks}, same_of_whole.strides());
  };
  if (of_part.back().isTensor()) {
    return_instead(call, view_of(of_part.back().toTensor(), of_whole.front()));
    return true;
  }
  std::vector<at::Tensor> views = of_part.back().toTensorVector();
  for (std::size_t i = 0; i < views.size(); ++i) views[i] = view_of(views[i], of_whole[i]);
  return_instead(call, std::move(views));
  return true;
}

}  // namespace

bool run_view(intercept::Call& call, SplitOwner& owner) {
  const auto arguments = call.arguments();
  const Split* const split = split_argument(arguments[0], owner);
  if (split == nullptr) return false;
  const std::string& op = call.op().operator_name().name;
  if (const int place = place_of_dim(op); place >= 0) return run_along_dim(call, *split, place);
  // view(self, dtype) and other overloads are not handled here.
  const bool reshapes = one_to_one().at(op) == &reshaped;
  if (reshapes && !arguments[1].isIntList()) return false;
  if (op == "aten::transpose" && !arguments[1].isInt()) return false;
  const at::Tensor whole = arguments[0].toTensor();
  const auto view = one_to_one().at(op)({whole, *split, arguments, owner.axis().size()});
  if (!view) return false;
  // The part's strides tell the whole's, unless it has one element along the dim.
  const auto of_whole = view->part.size(view->cut.dim) == 1
                            ? views_without_memory(call, arguments, whole)
                            : std::vector<at::Tensor>();
  return_instead(call, make_split_like(*split, view->part, view->cut,
                                       of_whole.empty() ? at::OptionalIntArrayRef()
                                                        : of_whole.front().strides()));
  return true;
}

}  // namespace lockstep::tensor
