// Runs between a constructor and LibTorch: makes the constructor's tensors without memory, and
// defers the operators that are called on them.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include <lockstep/deferred/factory_scope.h>
#include <lockstep/deferred/memory.h>
#include <lockstep/deferred/random_draws.h>
#include <lockstep/deferred/record.h>
#include <lockstep/intercept/owner.h>

namespace lockstep::deferred {

// A deferred memory and its storage, which this keeps alive.
struct LivingMemory {
  std::shared_ptr<Memory> memory;
  c10::Storage storage;
};
using LivingMemories = std::vector<LivingMemory>;

// The memories of one Construction: which of them hold their content, and how it is computed. The
// storages belong to the tensors; a memory without tensors is known only to records that compute
// other memories from it.
//
// Threading: one thread at a time, except account().
class Contents {
 public:
  // Operators on the tensors call `owner`, which outlives this.
  explicit Contents(intercept::Owner& owner) : owner_(owner) {}

  Log& log() { return log_; }
  const Account& account() const { return *account_; }

  // A tensor in a new memory; undefined if the system gives no addresses for it.
  at::Tensor make(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                  const std::shared_ptr<intercept::Owner>& owner);

  // The deferred memory of a tensor, if it has one.
  std::optional<LivingMemory> of(const at::Tensor& tensor) const;
  LivingMemories all() const;

  // Computes the content and keeps it until release() was called as often as hold(). A memory may
  // turn out to be no longer deferred. If a computation throws, everything is as it was.
  void hold(const LivingMemories& memories);
  void release(const LivingMemories& memories) noexcept;
  // Computes the content for good; the memories are no longer deferred.
  void keep(const LivingMemories& memories);

  // Must be called before every use of a memory. If the program used it through a pointer while
  // only zeros were deferred for it, it holds the right content and is no longer deferred. If
  // anything else was deferred, the touch is noted and the content discarded.
  void heed_touch(const LivingMemory& living);
  // Touches that are noted while the result lives happened while the constructor ran.
  [[nodiscard]] std::unique_ptr<WatchedConstructor> watch();
  // UsageError if a touch was noted; must be called while the constructor still runs.
  void check_touches();

  // Drops records that no tensor needs any more.
  void forget_unneeded();

 private:
  void leave_to_tensors(const LivingMemory& living);

  intercept::Owner& owner_;
  const std::shared_ptr<Account> account_ = std::make_shared<Account>();
  const std::shared_ptr<Touches> touches_ = std::make_shared<Touches>();
  Log log_;
  std::vector<std::weak_ptr<Memory>> memories_;
};

// The owner of its Construction's deferred tensors.
//
// An operator on one of them is deferred if it only writes to deferred tensors, or, within the
// scope of the constructor, if it only computes new tensors from them, which are then deferred,
// too. Any other operator runs at once: the values that it reads are in memory while it runs, and a
// tensor that it writes to is an ordinary one from then on. Operators that autograd records or
// refuses run at once, so that errors come where they would have come without us.
//
// Any thread may use it. One mutex guards the contents; the program's operators run without it,
// deferred operators run under it.
class Recorder final : public intercept::Owner,
                       public Factory,
                       public std::enable_shared_from_this<Recorder> {
 public:
  explicit Recorder(std::size_t smallest_bytes);

  at::Tensor make(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) override;
  void on_call(intercept::Call& call, std::span<const intercept::Use> uses) override;
  void on_save(const at::Tensor& tensor) const override;

  // Calls use(contents) under the mutex.
  template <typename Use>
  decltype(auto) with_contents(Use&& use) {
    const std::lock_guard lock(mutex_);
    return std::forward<Use>(use)(contents_);
  }

 private:
  // Whether an operator still has to run.
  enum class Run {
    no,          // it was deferred
    now,         // it needs values
    now_as_well  // it was deferred, but writes to memory that holds its content
  };
  // These are called with the mutex locked.
  at::Tensor make_deferred(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);
  Run put_off(intercept::Call& call, LivingMemories& used);
  Run put_off_writes(intercept::Call& call, Record record, LivingMemories& used);
  Run put_off_computation(intercept::Call& call, Record record);

  const std::size_t smallest_bytes_;
  mutable std::mutex mutex_;
  Contents contents_{*this};
  RandomDraws draws_;
  bool addresses_ran_out_ = false;
};

// Keeps the content of some memories in place while it lives.
class Hold {
 public:
  // The memories are held already; the destructor releases them.
  Hold(std::shared_ptr<Recorder> recorder, LivingMemories memories);
  ~Hold();
  Hold(Hold&&) noexcept = default;
  Hold& operator=(Hold&&) = delete;

 private:
  std::shared_ptr<Recorder> recorder_;
  LivingMemories memories_;
};

}  // namespace lockstep::deferred
