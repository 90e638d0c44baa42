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

// A view of a part, and the dim of the view that is cut.
struct PartView {
  at::Tensor part;
  std::int64_t dim;
};

// A view operator that was called on one cut tensor.
struct ViewCall {
  const at::Tensor& whole;
  const Split& split;
  std::span<const c10::IValue> arguments;
  int parts;

  at::Tensor part() const { return part_to_read(whole); }
  std::int64_t dim_argument(std::size_t index) const {
    return at::maybe_wrap_dim(arguments[index].toInt(), whole.dim());
  }
};

std::int64_t elements(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

// The dim of a view with these sizes along which ranks have equal parts, one after the other: the
// dim with as many elements before it as the cut dim of the whole. Negative where there is none.
std::int64_t dim_in_view(const Sizes& sizes, const ViewCall& call) {
  const auto before = elements(call.whole.sizes().slice(0, call.split.dim).vec());
  std::int64_t product = 1;
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    if (product == before && sizes[dim] != 1)
      return sizes[dim] % call.parts == 0 ? static_cast<std::int64_t>(dim) : -1;
    product *= sizes[dim];
  }
  return -1;
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
  const std::int64_t dim = dim_in_view(sizes, call);
  if (dim < 0) return {};
  sizes[static_cast<std::size_t>(dim)] /= call.parts;
  return PartView{call.part().reshape(sizes), dim};
}

std::optional<PartView> transposed(const ViewCall& call) {
  const std::int64_t first = call.dim_argument(1), second = call.dim_argument(2);
  const std::int64_t dim = call.split.dim;
  return PartView{call.part().transpose(first, second), dim == first    ? second
                                                        : dim == second ? first
                                                                        : dim};
}

std::optional<PartView> turned(const ViewCall& call) {  // t(self)
  return PartView{call.part().t(), call.whole.dim() == 2 ? 1 - call.split.dim : call.split.dim};
}

std::optional<PartView> permuted(const ViewCall& call) {
  const Sizes dims = call.arguments[1].toIntVector();
  for (std::size_t i = 0; i < dims.size(); ++i)
    if (at::maybe_wrap_dim(dims[i], call.whole.dim()) == call.split.dim)
      return PartView{call.part().permute(dims), static_cast<std::int64_t>(i)};
  return {};
}

std::optional<PartView> unsqueezed(const ViewCall& call) {
  const std::int64_t at = at::maybe_wrap_dim(call.arguments[1].toInt(), call.whole.dim() + 1);
  return PartView{call.part().unsqueeze(at), call.split.dim + (at <= call.split.dim ? 1 : 0)};
}

// squeeze(self), squeeze(self, dim). The sizes of the whole decide: a part may have one element
// where the whole has several.
std::optional<PartView> squeezed(const ViewCall& call) {
  if (call.arguments.size() > 1 && !call.arguments[1].isInt()) return {};
  PartView view{call.part(), call.split.dim};
  // The result is a new tensor even if no dim is removed.
  view.part = view.part.view(view.part.sizes());
  for (std::int64_t dim = call.whole.dim() - 1; dim >= 0; --dim) {
    const bool asked = call.arguments.size() == 1 || call.dim_argument(1) == dim;
    if (!asked || call.whole.size(dim) != 1) continue;
    view.part = view.part.squeeze(dim);
    if (dim < view.dim) --view.dim;
  }
  return view;
}

std::optional<PartView> expanded(const ViewCall& call) {  // expand(self, size, implicit)
  if (!call.arguments[1].isIntList()) return {};
  Sizes sizes = call.arguments[1].toIntVector();
  const auto more = static_cast<std::int64_t>(sizes.size()) - call.whole.dim();
  if (more < 0) return {};
  const std::int64_t dim = call.split.dim + more;
  std::int64_t& size = sizes[static_cast<std::size_t>(dim)];
  if (size != -1 && size != call.whole.size(call.split.dim)) return {};
  size = -1;
  return PartView{call.part().expand(sizes), dim};
}

std::optional<PartView> aliased(const ViewCall& call) {
  return PartView{call.part().alias(), call.split.dim};
}

std::optional<PartView> detached(const ViewCall& call) {
  return PartView{call.split.part.detach(), call.split.dim};
}

const std::unordered_map<std::string, std::optional<PartView> (*)(const ViewCall&)>& one_to_one() {
  static const std::unordered_map<std::string, std::optional<PartView> (*)(const ViewCall&)> views =
      {{"aten::view", reshaped},        {"aten::_unsafe_view", reshaped},
       {"aten::reshape", reshaped},     {"aten::_reshape_alias", reshaped},
       {"aten::transpose", transposed}, {"aten::t", turned},
       {"aten::permute", permuted},     {"aten::unsqueeze", unsqueezed},
       {"aten::squeeze", squeezed},     {"aten::expand", expanded},
       {"aten::alias", aliased},        {"aten::detach", detached}};
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

// select, slice, unbind, split, split_with_sizes along another dim than the one that is cut.
bool run_along_dim(intercept::Call& call, const Split& split, int place) {
  const auto arguments = arguments_of(call);
  const at::Tensor whole = arguments[0].toTensor();
  const auto at_place = static_cast<std::size_t>(place);
  if (arguments.size() <= at_place || !arguments[at_place].isInt()) return false;
  const std::int64_t along = at::maybe_wrap_dim(arguments[at_place].toInt(), whole.dim());
  if (along == split.dim) return false;
  const std::string& op = call.op().operator_name().name;
  const bool drops = op == "aten::select" || op == "aten::unbind";
  const std::int64_t dim = split.dim - (drops && along < split.dim ? 1 : 0);
  const auto of_whole = views_without_memory(call, arguments, whole);
  arguments[0] = part_to_read(whole);
  call.op().callBoxed(&call.stack());
  c10::IValue& result = call.stack().back();
  if (result.isTensor()) {
    result = make_split_like(split, result.toTensor(), dim, of_whole.front().strides());
    return true;
  }
  std::vector<at::Tensor> views = result.toTensorVector();
  for (std::size_t i = 0; i < views.size(); ++i)
    views[i] = make_split_like(split, views[i], dim, of_whole[i].strides());
  result = views;
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
  const auto of_whole = view->part.size(view->dim) == 1
                            ? views_without_memory(call, arguments, whole)
                            : std::vector<at::Tensor>();
  return_instead(call, make_split_like(*split, view->part, view->dim,
                                       of_whole.empty() ? at::OptionalIntArrayRef()
                                                        : of_whole.front().strides()));
  return true;
}

}  // namespace lockstep::tensor
