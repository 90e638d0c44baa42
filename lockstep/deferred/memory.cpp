#include <lockstep/deferred/memory.h>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include <c10/core/CPUAllocator.h>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>

namespace lockstep::deferred {

std::optional<ReservedMemory> ReservedMemory::reserve(std::size_t bytes) {
  LOCKSTEP_CHECK(bytes > 0);
  void* const address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) return std::nullopt;
  ReservedMemory memory(address, bytes);
  // A huge page could span two memories, and touching one would seem to touch both. The call fails
  // if the system has no huge pages.
  madvise(address, bytes, MADV_NOHUGEPAGE);
  if (memory.touched()) return std::nullopt;
  return memory;
}

ReservedMemory::~ReservedMemory() {
  if (address_ != nullptr) munmap(address_, bytes_);
}

ReservedMemory::ReservedMemory(ReservedMemory&& other) noexcept
    : address_(std::exchange(other.address_, nullptr)), bytes_(other.bytes_) {}

bool ReservedMemory::touched() const {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  std::array<unsigned char, 4096> resident;  // a byte for each page
  auto* const begin = static_cast<std::byte*>(address_);
  for (std::size_t at = 0; at < bytes_; at += resident.size() * page) {
    const std::size_t length = std::min(bytes_ - at, resident.size() * page);
    const std::size_t pages = (length + page - 1) / page;
    const int failed = mincore(begin + at, length, resident.data());
    LOCKSTEP_CHECK(failed == 0, "mincore: {}", std::strerror(errno));
    if (std::any_of(resident.begin(), resident.begin() + pages,
                    [](unsigned char byte) { return (byte & 1) != 0; }))
      return true;
  }
  return false;
}

void ReservedMemory::discard() const noexcept {
  if (madvise(address_, bytes_, MADV_DONTNEED) != 0)
    log::warn("{} bytes of a deferred tensor stay taken, as the system does not take them back: {}",
              bytes_, std::strerror(errno));
}

namespace {

// The address of this function identifies our storages.
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
  // The storage is resizable: an operator that resizes it gets ordinary memory.
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
