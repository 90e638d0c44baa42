// The memory of deferred tensors. To LibTorch it is an ordinary storage; its content can be
// computed later from the log of operators.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

namespace lockstep::deferred {

// Counts the memory that the tensors of one Construction take. Any thread may use it.
class Account {
 public:
  void take(std::size_t bytes) {
    const std::size_t now = bytes_.fetch_add(bytes) + bytes;
    std::size_t peak = peak_bytes_.load();
    while (peak < now && !peak_bytes_.compare_exchange_weak(peak, now)) {
    }
  }
  void give_back(std::size_t bytes) { bytes_.fetch_sub(bytes); }

  std::size_t bytes() const { return bytes_.load(); }
  std::size_t peak_bytes() const { return peak_bytes_.load(); }

 private:
  std::atomic<std::size_t> bytes_ = 0;
  std::atomic<std::size_t> peak_bytes_ = 0;
};

// Counts memory as taken while it lives.
class Taken {
 public:
  Taken(Account& account, std::size_t bytes) : account_(account), bytes_(bytes) {
    account_.take(bytes_);
  }
  ~Taken() { account_.give_back(bytes_); }
  Taken(const Taken&) = delete;
  Taken& operator=(const Taken&) = delete;

 private:
  Account& account_;
  std::size_t bytes_;
};

struct Memory;

// Notes whether a constructor used the memory of a tensor through a pointer while the tensor's
// values were deferred. Each Construction has one. The thread that used a memory is unknown: if
// several constructors run at once, a touch by one is reported by all. Any thread may use it.
class Touches {
 public:
  // Notes nothing while no constructor runs. Allocates nothing, because it is called when memory is
  // freed.
  void note(std::shared_ptr<const Memory> memory) {
    const std::lock_guard lock(mutex_);
    if (num_constructors_ > 0 && !first_) first_ = std::move(memory);
  }

  // The first memory noted since constructors have been running, or null.
  std::shared_ptr<const Memory> first() const {
    const std::lock_guard lock(mutex_);
    return first_;
  }

 private:
  friend class WatchedConstructor;

  mutable std::mutex mutex_;
  std::size_t num_constructors_ = 0;
  std::shared_ptr<const Memory> first_;
};

// Lives while a constructor runs.
class WatchedConstructor {
 public:
  explicit WatchedConstructor(std::shared_ptr<Touches> touches) : touches_(std::move(touches)) {
    const std::lock_guard lock(touches_->mutex_);
    ++touches_->num_constructors_;
  }
  ~WatchedConstructor() {
    const std::lock_guard lock(touches_->mutex_);
    if (--touches_->num_constructors_ == 0) touches_->first_.reset();
  }
  WatchedConstructor(const WatchedConstructor&) = delete;
  WatchedConstructor& operator=(const WatchedConstructor&) = delete;

 private:
  const std::shared_ptr<Touches> touches_;
};

// Addresses that take no memory until they are written to. Owns them; they stay the same until it
// is destroyed. Threading: one thread at a time.
class ReservedMemory {
 public:
  // Returns nothing if the system gives no addresses without memory behind them: overcommit is off
  // (vm.overcommit_memory=2), the process has reached its limit (ulimit -v), or it locks its memory
  // (mlockall).
  static std::optional<ReservedMemory> reserve(std::size_t bytes);

  ~ReservedMemory();
  ReservedMemory(ReservedMemory&& other) noexcept;
  ReservedMemory& operator=(ReservedMemory&&) = delete;

  void* address() const { return address_; }
  std::size_t bytes() const { return bytes_; }

  // Whether the addresses were read or written since they were made or discarded. A page that was
  // only read is resident, too, as the system's page of zeros. A write is missed if all of it has
  // gone to swap.
  bool touched() const;
  // Gives the memory back; the content is lost and reads as zeros.
  void discard() const noexcept;

 private:
  ReservedMemory(void* address, std::size_t bytes) : address_(address), bytes_(bytes) {}

  void* address_;
  std::size_t bytes_;
};

// One memory. It outlives its storage if records still compute others from it. The Recorder's mutex
// guards it; `blank` and `plain` change only while someone holds the storage.
struct Memory {
  std::size_t bytes = 0;
  // The shape and type of the tensor for which it was made.
  std::vector<std::int64_t> sizes;
  at::ScalarType dtype = at::ScalarType::Undefined;
  std::vector<std::size_t> writers;  // the numbers of the records that write to it, ascending
  // Nothing was written to it yet, or its content will be all zeros.
  bool blank = true;
  // The number of holders of the content, which is in place while there are any.
  std::size_t holders = 0;
  // Its tensors are ordinary ones from now on, and their content is unknown here.
  bool plain = false;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};

  bool holds_content() const { return holders > 0 && !plain; }
};

// The addresses of a memory. The storage owns it and destroys it, on any thread.
class Place {
 public:
  Place(ReservedMemory range, std::shared_ptr<Memory> memory, std::shared_ptr<Account> account,
        std::shared_ptr<Touches> touches);
  // Notes a touch of memory whose values were deferred.
  ~Place();
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;

  const std::shared_ptr<Memory>& memory() const { return memory_; }
  // Identifies the Construction, which has one account.
  const std::shared_ptr<Account>& account() const { return account_; }
  void* address() const { return range_.address(); }

  // Whether the memory was used through a pointer while its values were not there.
  bool touched() const { return !taken_ && range_.touched(); }
  // Discards everything written there, as if it had not been touched.
  void wipe() const { range_.discard(); }
  // Counts the memory as taken; give_back() returns it.
  void take();
  void give_back();

 private:
  ReservedMemory range_;
  std::shared_ptr<Memory> memory_;
  std::shared_ptr<Account> account_;
  std::shared_ptr<Touches> touches_;
  bool taken_ = false;
};

// A storage for a new memory. Undefined if the system gives no addresses.
c10::Storage make_storage(const std::shared_ptr<Memory>& memory,
                          const std::shared_ptr<Account>& account,
                          const std::shared_ptr<Touches>& touches);

// Null if the storage is not from make_storage().
Place* place_of(const c10::Storage& storage);
Place* place_of(const at::Tensor& tensor);

}  // namespace lockstep::deferred
