// The memory of deferred tensors: LibTorch takes it for an ordinary storage, and we know how to
// compute the content it will have.
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

// How much memory the tensors of one Construction take, counted where it is taken. Threading: any.
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

// Whether a constructor used the memory of a tensor through a pointer while the tensor's values
// were put off. There is one for each Construction. Nothing tells which thread used a memory: if
// several constructors run at once, a touch by one is reported by all. Threading: any.
class Touches {
 public:
  // Remembers nothing while no constructor runs. Allocates nothing, because it is called when
  // memory is freed.
  void note(std::shared_ptr<const Memory> memory) {
    const std::lock_guard lock(mutex_);
    if (num_constructors_ > 0 && !first_) first_ = std::move(memory);
  }

  // The first memory that was noted since any constructor has been running, or null.
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

// A constructor runs while this lives.
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

// Addresses that take no memory until somebody writes there. Owns them; they stay the same until it
// is destroyed. Threading: one thread at a time.
class ReservedMemory {
 public:
  // Returns nothing where the system gives no addresses without memory behind them: overcommit is
  // off (vm.overcommit_memory=2), the process has reached its limit (ulimit -v), or it locks its
  // memory (mlockall).
  static std::optional<ReservedMemory> reserve(std::size_t bytes);

  ~ReservedMemory();
  ReservedMemory(ReservedMemory&& other) noexcept;
  ReservedMemory& operator=(ReservedMemory&&) = delete;

  void* address() const { return address_; }
  std::size_t bytes() const { return bytes_; }

  // Whether anybody has read or written there since it was made or discarded: a page that was only
  // read is resident, too, as the system's page of zeros. A write is missed if all of it has gone
  // to swap.
  bool touched() const;
  // Gives the memory back; the content is lost and reads as zeros.
  void discard() const noexcept;

 private:
  ReservedMemory(void* address, std::size_t bytes) : address_(address), bytes_(bytes) {}

  void* address_;
  std::size_t bytes_;
};

// One memory. It outlives its storage where records still compute others from it. The Recorder's
// mutex guards it; `blank` and `plain` change only while somebody has the storage.
struct Memory {
  std::size_t bytes = 0;
  // The shape and type of the tensor that it was made for.
  std::vector<std::int64_t> sizes;
  at::ScalarType dtype = at::ScalarType::Undefined;
  std::vector<std::size_t> writers;  // the numbers of the records that write to it, ascending
  // Nothing was written to it yet, or its content will be all zeros.
  bool blank = true;
  // How many hold the content in place: it is there while anybody does.
  std::size_t holders = 0;
  // Its tensors are ordinary ones from now on, and we no longer know what they hold.
  bool plain = false;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};

  bool holds_content() const { return holders > 0 && !plain; }
};

// Where a memory lies. The storage owns it and destroys it, on any thread.
class Place {
 public:
  Place(ReservedMemory range, std::shared_ptr<Memory> memory, std::shared_ptr<Account> account,
        std::shared_ptr<Touches> touches);
  // Notes a touch of memory whose values were put off.
  ~Place();
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;

  const std::shared_ptr<Memory>& memory() const { return memory_; }
  // Each Construction has one: this tells whose memory it is.
  const std::shared_ptr<Account>& account() const { return account_; }
  void* address() const { return range_.address(); }

  // Whether somebody used the memory through a pointer while its values were not there.
  bool touched() const { return !taken_ && range_.touched(); }
  // Discards what was written there, as if nobody had touched it.
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

// A storage for a new memory. Undefined where the system gives no addresses.
c10::Storage make_storage(const std::shared_ptr<Memory>& memory,
                          const std::shared_ptr<Account>& account,
                          const std::shared_ptr<Touches>& touches);

// Null where make_storage() did not make the storage.
Place* place_of(const c10::Storage& storage);
Place* place_of(const at::Tensor& tensor);

}  // namespace lockstep::deferred
