#include <lockstep/deferred/memory.h>

#include <utility>

#include <c10/core/CPUAllocator.h>

namespace lockstep::deferred {

namespace {

// Its address marks the storages that are ours.
void delete_place(void* place) { delete static_cast<Place*>(place); }

}  // namespace

Place::Place(ReservedMemory range, std::shared_ptr<Memory> memory, std::shared_ptr<Account> account,
             std::shared_ptr<Touches> touches)
    : range_(std::move(range)),
      memory_(std::move(memory)),
      account_(std::move(account)),
      touches_(std::move(touches)) {}

Place::~Place() {
  if (!memory_->blank && touched()) touches_->note(memory_);
  if (taken_) account_->give_back(range_.bytes());
}

void Place::take() {
  if (std::exchange(taken_, true)) return;
  account_->take(range_.bytes());
}

void Place::give_back() {
  if (!std::exchange(taken_, false)) return;
  range_.discard();
  account_->give_back(range_.bytes());
}

c10::Storage make_storage(const std::shared_ptr<Memory>& memory,
                          const std::shared_ptr<Account>& account,
                          const std::shared_ptr<Touches>& touches) {
  auto range = ReservedMemory::reserve(memory->bytes);
  if (!range) return {};
  void* const address = range->address();
  auto place = std::make_unique<Place>(std::move(*range), memory, account, touches);
  c10::DataPtr data(address, place.release(), &delete_place, c10::Device(c10::kCPU));
  // Resizable, as an operator that resizes it gets a memory of the ordinary kind from there on.
  c10::Storage storage(c10::Storage::use_byte_size_t(), memory->bytes, std::move(data),
                       c10::GetCPUAllocator(), true);
  memory->storage = storage.getWeakStorageImpl();
  return storage;
}

Place* place_of(const c10::Storage& storage) {
  return storage ? storage.data_ptr().cast_context<Place>(&delete_place) : nullptr;
}

Place* place_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() ? place_of(tensor.storage()) : nullptr;
}

}  // namespace lockstep::deferred
