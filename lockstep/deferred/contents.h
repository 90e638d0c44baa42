// Which deferred memories there are, which of them hold their content, and how they come to.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include <lockstep/deferred/account.h>
#include <lockstep/deferred/log.h>
#include <lockstep/intercept/owner.h>

namespace lockstep::deferred {

// A deferred memory that tensors have, kept from going with the last of them.
struct LivingMemory {
  std::shared_ptr<Memory> memory;
  c10::Storage storage;
};
using LivingMemories = std::vector<LivingMemory>;

// The memories of one Construction. Their storages belong to the tensors; a memory that no tensor
// has any more is only known to records that compute others from it.
//
// Threading: one at a time, but for account().
class Contents {
 public:
  // `owner`, which outlives this, hears of operators on the tensors.
  explicit Contents(intercept::Owner& owner) : owner_(owner) {}

  Log& log() { return log_; }
  const Account& account() const { return *account_; }

  // A tensor in a new memory. Undefined where there are no addresses for it.
  at::Tensor make(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                  const std::shared_ptr<intercept::Owner>& owner);

  // The deferred memory of a tensor, if that has one.
  std::optional<LivingMemory> of(const at::Tensor& tensor) const;
  LivingMemories all() const;

  // The content is there until as many release() as hold(), unless the memory turns out to be
  // deferred no longer. What a computation throws leaves everything as it was.
  void hold(const LivingMemories& memories);
  void release(const LivingMemories& memories) noexcept;
  // The content is there for good, and the memories are no longer deferred.
  void keep(const LivingMemories& memories);

  // To be called before anything happens to a memory. Where a program used it through a pointer and
  // nothing was put off for it but zeros, what is there is the content: the memory is no longer
  // deferred. Where something was put off, that is noted, and what is there goes.
  void heed_touch(const LivingMemory& living);
  // What is noted from here on was done while the constructor ran.
  [[nodiscard]] std::unique_ptr<WatchedConstructor> watch();
  // UsageError where something is noted, or would be, while the constructor still runs.
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

}  // namespace lockstep::deferred
