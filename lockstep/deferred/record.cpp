#include <lockstep/deferred/record.h>

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>

#include <lockstep/deferred/as_is.h>
#include <lockstep/deferred/operator_traits.h>
#include <lockstep/intercept/key.h>

namespace lockstep::deferred {

namespace {

// Newer LibTorch has no names for dimensions any more.
template <typename Tensor>
bool has_names(const Tensor& tensor) {
  if constexpr (requires { tensor.has_names(); })
    return tensor.has_names();
  else
    return false;
}

// Neither shape nor strides say all there is to know of other tensors.
bool is_ordinary(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.is_cpu() && !tensor.is_quantized() &&
         !tensor.is_conj() && !tensor.is_neg() && !has_names(tensor) && !tensor.is_mkldnn();
}

bool is_deferred_in(const at::Tensor& tensor, const Account* account) {
  const Place* const place = place_of(tensor);
  return place != nullptr && place->account().get() == account && !place->memory()->plain;
}

// Carries the key for an owner other than us, who may have to bring the content first.
bool is_somebody_elses(const at::Tensor& tensor, const Account* account) {
  const Place* const place = place_of(tensor);
  const bool was_ours = place != nullptr && place->account().get() == account;
  return intercept::is_tagged(tensor) && !was_ours;
}

// Undefined where a copy could not have the same strides, which matter to how kernels add.
at::Tensor copy_of(const at::Tensor& tensor) {
  if (!tensor.is_non_overlapping_and_dense()) return {};
  const AsIs as_is;
  at::Tensor copy = tensor.detach().clone();
  // A number as an operand has less of a say in the type of the result than a tensor has.
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

void add_unique(std::vector<Memory*>& memories, const Region& region) {
  Memory* const memory = region.memory.get();
  if (std::find(memories.begin(), memories.end(), memory) == memories.end())
    memories.push_back(memory);
}

// What is read in the same call is not overwritten before.
void correct_overwriting(std::vector<DeferredArgument>& deferred) {
  for (DeferredArgument& written : deferred) {
    if (written.access != Access::overwrite) continue;
    const bool used_elsewhere =
        std::any_of(deferred.begin(), deferred.end(), [&](const DeferredArgument& other) {
          return &other != &written && other.region.memory == written.region.memory;
        });
    if (used_elsewhere || !written.region.covers_memory) written.access = Access::modify;
  }
}

}  // namespace

Region::Region(const at::Tensor& tensor)
    : memory(place_of(tensor)->memory()),
      dtype(tensor.scalar_type()),
      sizes(tensor.sizes().vec()),
      strides(tensor.strides().vec()),
      offset(tensor.storage_offset()),
      covers_memory(offset == 0 && tensor.is_non_overlapping_and_dense() &&
                    tensor.nbytes() == memory->bytes) {}

at::Tensor Region::on(const c10::Storage& storage) const {
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  tensor.unsafeGetTensorImpl()->set_storage_offset(offset);
  return tensor;
}

std::vector<Memory*> Record::inputs() const {
  std::vector<Memory*> memories;
  for (const DeferredArgument& argument : deferred)
    if (argument.access != Access::overwrite) add_unique(memories, argument.region);
  return memories;
}

std::vector<Memory*> Record::outputs() const {
  std::vector<Memory*> memories;
  for (const DeferredArgument& argument : deferred)
    if (argument.access != Access::read) add_unique(memories, argument.region);
  for (const Region& result : results) add_unique(memories, result);
  return memories;
}

std::optional<Record> capture(const c10::OperatorHandle& op, std::span<const c10::IValue> arguments,
                              const Account* account) {
  Record record{.op = op};
  bool complete = true;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue kept = with_own_lists(arguments[i]);
    for_each_tensor(arguments[i], [&](const at::Tensor& tensor, auto element) {
      if (!is_ordinary(tensor) || is_somebody_elses(tensor, account)) {
        complete = false;
      } else if (is_deferred_in(tensor, account)) {
        const Access access = !is_written(op, i)      ? Access::read
                              : is_overwritten(op, i) ? Access::overwrite
                                                      : Access::modify;
        record.deferred.push_back({Region(tensor), access, i, element});
        set_tensor(kept, element, at::Tensor());
      } else {
        const at::Tensor copy = is_written(op, i) ? at::Tensor() : copy_of(tensor);
        if (!copy.defined()) complete = false;
        set_tensor(kept, element, copy);
      }
    });
    if (!complete) return std::nullopt;
    record.arguments.push_back(std::move(kept));
  }
  correct_overwriting(record.deferred);
  return record;
}

void set_tensor(c10::IValue& argument, std::optional<std::size_t> element, at::Tensor tensor) {
  if (element)
    argument.toList().set(*element, c10::IValue(std::move(tensor)));
  else
    argument = c10::IValue(std::move(tensor));
}

c10::IValue with_own_lists(const c10::IValue& argument) {
  return argument.isList() ? c10::IValue(argument.toList().copy()) : argument;
}

}  // namespace lockstep::deferred
