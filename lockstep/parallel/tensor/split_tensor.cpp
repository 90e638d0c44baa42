#include <lockstep/parallel/tensor/split_tensor.h>

#include <algorithm>
#include <numeric>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/custom_class.h>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/intercept/backward.h>
#include <lockstep/intercept/owner.h>
#include <lockstep/nn/tensor_parallel/tensor_moves.h>

namespace lockstep::tensor {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The address of this function marks the storages that are ours.
void delete_split(void* split) { delete static_cast<Split*>(split); }

bool in_backward() { return torch::autograd::get_current_graph_task_nodes_in_graph() != nullptr; }

// A node keeps this of a cut tensor, without its memory.
struct SplitCapsule : torch::CustomClassHolder {
  explicit SplitCapsule(const Split& of, c10::VariableVersion version = {})
      : split{.owner = of.owner,
              .part = {},
              .cut = of.cut,
              .source = of.source,
              .is_sum = of.is_sum},
        version(std::move(version)) {}
  Split split;
  c10::VariableVersion version;  // the part's counter
};

// Leads from a tensor that takes gradients to its part, and back from the part's gradient to a cut
// gradient of the tensor.
class PartOf : public torch::autograd::Function<PartOf> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor) {
    const Split& split = *split_of(tensor);
    context->saved_data["split"] =
        c10::IValue::make_capsule(c10::make_intrusive<SplitCapsule>(split));
    return split.part.detach();
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (!gradients.at(0).defined()) return {at::Tensor()};
    const auto capsule =
        c10::static_intrusive_pointer_cast<SplitCapsule>(context->saved_data["split"].toCapsule());
    // Every rank has the gradient of a sum.
    if (capsule->split.is_sum) return {gradients[0]};
    return {make_split_like(capsule->split, gradients[0], capsule->split.cut)};
  }
};

Split& mutable_split_of(const at::Tensor& tensor) {
  return *static_cast<Split*>(tensor.unsafeGetTensorImpl()
                                  ->unsafe_storage()
                                  .unsafeGetStorageImpl()
                                  ->data_ptr()
                                  .get_context());
}

// The tensor that stands for a part, without a graph.
at::Tensor shell_of(Split split, at::OptionalIntArrayRef given_strides) {
  const at::Tensor part = split.part;
  LOCKSTEP_CHECK(part.defined() && split_of(part) == nullptr);
  LOCKSTEP_CHECK(0 <= split.cut.dim && split.cut.dim < part.dim());
  const int parts = split.is_sum ? 1 : split.owner->axis().size();
  std::vector<std::int64_t> sizes = part.sizes().vec();
  sizes[static_cast<std::size_t>(split.cut.dim)] *= parts;
  const std::vector<std::int64_t> strides =
      given_strides ? given_strides->vec() : whole_strides(part.strides(), split.cut.dim, parts);
  const std::shared_ptr<SplitOwner> owner = split.owner;
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), 0,
      c10::DataPtr(nullptr, new Split(std::move(split)), &delete_split, part.device()),
      /*allocator=*/nullptr, /*resizable=*/false);
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      c10::Storage(storage), part.key_set().add(intercept::kKey), part.dtype());
  impl->set_sizes_and_strides(sizes, strides);
  // Autograd asks for the storage of gradients that it adds up.
  if (!in_backward()) impl->set_storage_access_should_throw();
  intercept::add_owner(storage, owner);
  at::Tensor tensor(std::move(impl));
  // Code that saves the tensor has to notice when the part is written to.
  if (!part.is_inference() && !tensor.is_inference())
    torch::autograd::impl::set_version_counter(tensor,
                                               torch::autograd::impl::version_counter(part));
  return tensor;
}

// Leads from a part with a graph to the tensor that stands for it. Its gradients, whole or cut,
// come from code that is no operator.
class Shown : public torch::autograd::Function<Shown> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& part, const Split& split,
                            at::OptionalIntArrayRef strides) {
    context->saved_data["split"] = c10::IValue::make_capsule(
        c10::make_intrusive<SplitCapsule>(split, torch::autograd::impl::version_counter(part)));
    context->saved_data["version"] = static_cast<std::int64_t>(part._version());
    return shell_of(split, strides);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto capsule =
        c10::static_intrusive_pointer_cast<SplitCapsule>(context->saved_data["split"].toCapsule());
    const Split& split = capsule->split;
    if (capsule->version.current_version() != context->saved_data["version"].toInt())
      throw UsageError("a gradient came for a tensor that is cut over ranks, comes from '{}', and "
                       "was written to since, in place or through a view: write to a clone()",
                       *split.source);
    const at::Tensor& gradient = gradients.at(0);
    if (!gradient.defined()) return {at::Tensor(), at::Tensor(), at::Tensor()};
    const Split* const cut = split_of(gradient);
    if (cut != nullptr && cut->owner == split.owner && cut->cut == split.cut)
      return {part_to_read(gradient), at::Tensor(), at::Tensor()};
    const at::Tensor whole = cut != nullptr ? whole_of(gradient) : gradient;
    if (split.is_sum) return {whole, at::Tensor(), at::Tensor()};
    return {take_part(whole, split.cut, split.owner->axis()), at::Tensor(), at::Tensor()};
  }
};

bool is_recorded(const at::Tensor& tensor) {
  return tensor.requires_grad() && c10::GradMode::is_enabled();
}

// Whether gradients belong to the tensor itself, and not directly to its part.
bool takes_gradients(const at::Tensor& tensor, const Split& split) {
  return tensor.is_leaf() || tensor.grad_fn().get() != split.node || tensor.retains_grad() ||
         !torch::autograd::impl::hooks(tensor).empty();
}

// A part with its blocks as a dim of their own, before the one that is cut.
at::Tensor with_blocks(const at::Tensor& x, CutDim cut) {
  return x.unflatten(cut.dim, {cut.blocks, -1});
}

at::Tensor gather_parts(const at::Tensor& part, CutDim cut, const nn::TensorAxis& axis) {
  if (cut.blocks == 1) return nn::gather_parts(part, cut.dim, axis);
  return nn::gather_parts(with_blocks(part, cut), cut.dim + 1, axis).flatten(cut.dim, cut.dim + 1);
}

// The dims from the outermost in memory to the innermost.
std::vector<std::int64_t> order_in_memory(const at::Tensor& tensor) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(tensor.dim()));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
    return tensor.stride(a) > tensor.stride(b);
  });
  return order;
}

}  // namespace

std::vector<std::int64_t> whole_strides(at::IntArrayRef part_strides, std::int64_t dim, int parts) {
  std::vector<std::int64_t> strides = part_strides.vec();
  const std::int64_t of_dim = strides[static_cast<std::size_t>(dim)];
  for (std::size_t i = 0; i < strides.size(); ++i) {
    // If a part has one element in the dim, dims before it may have the same stride.
    const bool outside =
        strides[i] > of_dim || (strides[i] == of_dim && static_cast<std::int64_t>(i) < dim);
    if (outside) strides[i] *= parts;
  }
  return strides;
}

std::vector<std::int64_t> part_strides(at::IntArrayRef whole_strides, std::int64_t dim, int parts) {
  std::vector<std::int64_t> strides = whole_strides.vec();
  const std::int64_t of_dim = strides[static_cast<std::size_t>(dim)];
  for (std::int64_t& stride : strides)
    if (stride > of_dim) stride /= parts;
  return strides;
}

at::Tensor make_split(Split split, at::OptionalIntArrayRef strides) {
  split.node = nullptr;
  if (!is_recorded(split.part)) return shell_of(std::move(split), strides);
  const at::Tensor part = split.part;
  at::Tensor tensor = Shown::apply(part, split, strides);
  mutable_split_of(tensor).node = tensor.grad_fn().get();
  return tensor;
}

at::Tensor make_split_like(const Split& like, at::Tensor part, CutDim cut,
                           at::OptionalIntArrayRef strides) {
  return make_split({like.owner, std::move(part), cut, like.source}, strides);
}

const Split* split_of(const at::Tensor& tensor) {
  if (!intercept::is_tagged(tensor)) return nullptr;
  const c10::Storage& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  return storage ? storage.unsafeGetStorageImpl()->data_ptr().cast_context<Split>(&delete_split)
                 : nullptr;
}

at::Tensor part_to_read(const at::Tensor& tensor) {
  const Split& split = *split_of(tensor);
  const bool leads_to_tensor =
      !split.trained && is_recorded(tensor) && takes_gradients(tensor, split);
  return leads_to_tensor ? PartOf::apply(tensor) : split.part;
}

at::Tensor part_to_write(const at::Tensor& tensor) {
  Split& split = mutable_split_of(tensor);
  if (!is_recorded(tensor) || !takes_gradients(tensor, split)) return split.part;
  if (tensor.is_leaf())
    throw UsageError("'{}', which requires a gradient, is written to while gradients are recorded: "
                     "do so under a torch::NoGradGuard",
                     *split.source);
  // From now on the part has the graph of the tensor.
  split.part = PartOf::apply(tensor);
  return split.part;
}

void was_written(const at::Tensor& tensor) {
  Split& split = mutable_split_of(tensor);
  if (!is_recorded(split.part)) return;
  const at::Tensor shown = Shown::apply(split.part, split, tensor.strides());
  torch::autograd::impl::set_gradient_edge(tensor, torch::autograd::impl::gradient_edge(shown));
  split.node = tensor.grad_fn().get();
}

at::Tensor take_part(const at::Tensor& whole, CutDim cut, const nn::TensorAxis& axis) {
  if (cut.blocks == 1) return nn::take_part(whole, cut.dim, axis);
  return nn::take_part(with_blocks(whole, cut), cut.dim + 1, axis).flatten(cut.dim, cut.dim + 1);
}

at::Tensor own_part(const at::Tensor& whole, CutDim cut, const nn::TensorAxis& axis) {
  const std::int64_t size = whole.size(cut.dim) / cut.blocks / axis.size();
  return with_blocks(whole, cut)
      .narrow(cut.dim + 1, axis.rank() * size, size)
      .flatten(cut.dim, cut.dim + 1);
}

at::Tensor whole_of(const at::Tensor& tensor) {
  const Split& split = *split_of(tensor);
  at::Tensor part = part_to_read(tensor);
  // Messages are not operators, so whoever owns the part's memory has to put it there now.
  if (intercept::is_tagged(part)) part = part.clone();
  const auto& axis = split.owner->axis();
  if (split.is_sum) return nn::leave_products(part, axis);
  if (tensor.is_contiguous()) return gather_parts(part, split.cut, axis);
  const std::vector<std::int64_t> order = order_in_memory(tensor);
  const auto place = std::ranges::find(order, split.cut.dim) - order.begin();
  std::vector<std::int64_t> back(order.size());
  for (std::size_t i = 0; i < order.size(); ++i) back[static_cast<std::size_t>(order[i])] = i;
  return gather_parts(part.permute(order), {place, split.cut.blocks}, axis).permute(back);
}

at::Tensor SplitOwner::train_part(const at::Tensor& parameter) {
  Split& split = mutable_split_of(parameter);
  if (split.trained) return split.part;
  const c10::NoGradGuard no_grad;
  const at::Tensor gradient = std::exchange(parameter.mutable_grad(), at::Tensor());
  split.part.set_requires_grad(parameter.requires_grad());
  if (gradient.defined()) split.part.mutable_grad() = split_of(gradient)->part;
  split.trained = true;
  intercept::GradientHook::refuse_gradients(
      parameter,
      fmt::format("'{}' is cut over {} ranks, and code that is no operator of LibTorch's "
                  "(a torch::autograd::Function, torch::autograd::grad()) asks for its "
                  "gradient, which goes to this rank's part since wrap_model(): give "
                  "that code what an operator makes of the parameter, such as a view",
                  *split.source, axis_.size()));
  return split.part;
}

at::Tensor SplitOwner::shown_gradient(const at::Tensor& parameter,
                                      const at::Tensor& of_part) const {
  // A gradient without memory says itself what to do instead of using it.
  if (intercept::is_tagged(of_part)) return of_part;
  const Split& split = *split_of(parameter);
  return make_split_like(split, of_part, split.cut);
}

void GatherLog::add(const std::string& op, const std::string& source, std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  Count& count = counts_[{op, source}];
  ++count.calls;
  count.bytes += bytes;
  if (!std::exchange(said_[op], true) && speaks_)
    log::warn("{} needs all of what comes from '{}' and is cut over the ranks: {} bytes are put "
              "together on each of them, here and wherever it is called; gathers() has the sums",
              op, source, bytes);
}

std::vector<Gathered> GatherLog::all() const {
  const std::lock_guard lock(mutex_);
  std::vector<Gathered> all;
  for (const auto& [names, count] : counts_)
    all.push_back({names.first, names.second, count.calls, count.bytes});
  return all;
}

void GatherLog::clear() {
  const std::lock_guard lock(mutex_);
  counts_.clear();
}

void GatherLog::trace() {
  const std::lock_guard lock(mutex_);
  speaks_ = false;
  traces_ = true;
}

void GatherLog::note_use(LayerUse use) {
  const std::lock_guard lock(mutex_);
  uses_.push_back(std::move(use));
}

std::vector<LayerUse> GatherLog::uses() const {
  const std::lock_guard lock(mutex_);
  return uses_;
}

}  // namespace lockstep::tensor
