// The memory of deferred tensors: what LibTorch takes for an ordinary storage, and what we know of
// the content it will have.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <lockstep/deferred/account.h>
#include <lockstep/deferred/reserved_memory.h>
#include <lockstep/deferred/touches.h>

namespace lockstep::deferred {

// One memory, which outlives its storage where records still compute others from it. Its Recorder's
// mutex guards it; but what says of its content that it is blank or plain changes only while
// somebody has the storage.
struct Memory {
  std::size_t bytes = 0;
  // Of the tensor that it was made for.
  std::vector<std::int64_t> sizes;
  at::ScalarType dtype = at::ScalarType::Undefined;
  std::vector<std::size_t> writers;  // the numbers of the records that write to it, ascending
  // Nothing happened to it yet, or it comes to be all zeros.
  bool blank = true;
  // Whoever needs the content where it lies; it is there while there is one.
  std::size_t holders = 0;
  // Left to its tensors for good: they are as any others, and what they hold is no longer known.
  bool plain = false;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};

  bool holds_content() const { return holders > 0 && !plain; }
};

// Where a memory lies. Belongs to the storage and goes with it, on any thread.
class Place {
 public:
  Place(ReservedMemory range, std::shared_ptr<Memory> memory, std::shared_ptr<Account> account,
        std::shared_ptr<Touches> touches);
  // Notes where the memory was touched, and was not to be.
  ~Place();
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;

  const std::shared_ptr<Memory>& memory() const { return memory_; }
  // There is one for each Construction: this tells whose it is.
  const std::shared_ptr<Account>& account() const { return account_; }
  void* address() const { return range_.address(); }

  // Whether somebody used the memory through a pointer, while there is nothing in it.
  bool touched() const { return !taken_ && range_.touched(); }
  // What was written there meanwhile is gone, and it is as if nobody had touched it.
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

// A storage for a new memory. Undefined where no addresses are to be had.
c10::Storage make_storage(const std::shared_ptr<Memory>& memory,
                          const std::shared_ptr<Account>& account,
                          const std::shared_ptr<Touches>& touches);

// Null where the storage is none that make_storage() gave.
Place* place_of(const c10::Storage& storage);
Place* place_of(const at::Tensor& tensor);

}  // namespace lockstep::deferred
