#include <lockstep/deferred/contents.h>

#include <utility>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>

#include <lockstep/base/error.h>
#include <lockstep/deferred/replay.h>
#include <lockstep/intercept/key.h>

namespace lockstep::deferred {

namespace {

constexpr auto kGone =
    "a tensor was used whose values had been put off, after the Construction that could have "
    "computed them was gone: keep it until the values of all tensors have been asked for";

}  // namespace

at::Tensor Contents::make(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                          const std::shared_ptr<intercept::Owner>& owner) {
  const auto type = c10::scalarTypeToTypeMeta(dtype);
  const std::size_t bytes = at::detail::computeStorageNbytes(sizes, strides, type.itemsize());
  c10::Storage storage = make_storage(bytes, account_);
  if (!storage) return {};
  memories_.push_back(place_of(storage)->memory());
  intercept::add_owner(storage, owner, kGone);
  const auto keys = c10::DispatchKeySet(c10::DispatchKey::CPU).add(intercept::kKey);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, type);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return tensor;
}

std::optional<LivingMemory> Contents::of(const at::Tensor& tensor) const {
  const Place* const place = place_of(tensor);
  if (place == nullptr || place->account() != account_ || place->memory()->plain)
    return std::nullopt;
  return LivingMemory{place->memory(), tensor.storage()};
}

LivingMemories Contents::all() const {
  LivingMemories all;
  for (const auto& known : memories_) {
    const auto memory = known.lock();
    if (!memory || memory->plain) continue;
    if (auto storage = memory->storage.lock()) all.push_back({memory, std::move(storage)});
  }
  return all;
}

void Contents::hold(const LivingMemories& memories) {
  LivingMemories empty;
  for (const LivingMemory& living : memories)
    if (living.memory->holders == 0) empty.push_back(living);
  for (const LivingMemory& living : empty) place_of(living.storage)->take();
  try {
    std::vector<const Memory*> targets;
    for (const LivingMemory& living : empty) targets.push_back(living.memory.get());
    replay(log_, targets, *account_);
  } catch (...) {
    for (const LivingMemory& living : empty) place_of(living.storage)->give_back();
    throw;
  }
  for (const LivingMemory& living : memories) ++living.memory->holders;
}

void Contents::release(const LivingMemories& memories) noexcept {
  for (const auto& [memory, storage] : memories)
    if (--memory->holders == 0 && !memory->plain) place_of(storage)->give_back();
}

void Contents::keep(const LivingMemories& memories) {
  hold(memories);
  for (const LivingMemory& living : memories) leave_to_tensors(living);
}

void Contents::leave_to_tensors(const LivingMemory& living) {
  living.memory->plain = true;
  intercept::remove_owner(living.storage, &owner_);
}

void Contents::take_as_it_is_if_touched(const LivingMemory& living) {
  if (living.memory->holders > 0 || !log_.is_blank(*living.memory)) return;
  Place& place = *place_of(living.storage);
  if (!place.touched()) return;
  place.take();
  leave_to_tensors(living);
}

void Contents::check_touched() {
  for (const LivingMemory& living : all()) {
    take_as_it_is_if_touched(living);
    if (!living.memory->plain && place_of(living.storage)->touched())
      throw UsageError("the constructor used the memory of a tensor of {} bytes through a pointer "
                       "(data_ptr or an accessor), where its values had been put off: use "
                       "LibTorch's operators on it, or construct the model plainly",
                       living.memory->bytes);
  }
}

void Contents::forget_unneeded() {
  std::vector<const Memory*> memories;
  for (const LivingMemory& living : all()) memories.push_back(living.memory.get());
  log_.forget_all_but(memories);
  std::erase_if(memories_, [](const auto& known) { return known.expired(); });
}

}  // namespace lockstep::deferred
