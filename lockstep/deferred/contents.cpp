#include <lockstep/deferred/contents.h>

#include <utility>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <spdlog/fmt/ranges.h>

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
  const auto memory = std::make_shared<Memory>();
  memory->bytes = at::detail::computeStorageNbytes(sizes, strides, type.itemsize());
  memory->sizes = sizes.vec();
  memory->dtype = dtype;
  c10::Storage storage = make_storage(memory, account_, touches_);
  if (!storage) return {};
  memories_.push_back(memory);
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
  for (const LivingMemory& living : memories) {
    heed_touch(living);
    if (living.memory->holders == 0 && !living.memory->plain) empty.push_back(living);
  }
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

void Contents::heed_touch(const LivingMemory& living) {
  Place& place = *place_of(living.storage);
  if (living.memory->holders > 0 || !place.touched()) return;
  if (living.memory->blank) {
    place.take();
    leave_to_tensors(living);
  } else {
    touches_->note(living.memory);
    place.wipe();
  }
}

std::unique_ptr<WatchedConstructor> Contents::watch() {
  // What was done before is none of the constructor's.
  for (const LivingMemory& living : all()) heed_touch(living);
  return std::make_unique<WatchedConstructor>(touches_);
}

void Contents::check_touches() {
  for (const LivingMemory& living : all()) heed_touch(living);
  if (const auto touched = touches_->first())
    throw UsageError(
        "the constructor used values through a pointer (data_ptr or an accessor) which had been "
        "put off, those of a tensor of type {} and shape [{}]: use LibTorch's operators on it, or "
        "construct the model plainly",
        c10::toString(touched->dtype), fmt::join(touched->sizes, ", "));
}

void Contents::forget_unneeded() {
  std::vector<const Memory*> memories;
  for (const LivingMemory& living : all()) memories.push_back(living.memory.get());
  log_.forget_all_but(memories);
  std::erase_if(memories_, [](const auto& known) { return known.expired(); });
}

}  // namespace lockstep::deferred
