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

  // The content is there until as many release() as hold(). What a computation throws leaves
  // everything as it was.
  void hold(const LivingMemories& memories);
  void release(const LivingMemories& memories) noexcept;
  // The content is there for good, and the memories are no longer deferred.
  void keep(const LivingMemories& memories);

  // Where a program wrote through a pointer to memory that nothing was put off for, that is the
  // content: the memory is no longer deferred.
  void take_as_it_is_if_touched(const LivingMemory& living);
  // As above for all; UsageError where what was put off contradicts what is there.
  void check_touched();

  // Drops records that no tensor needs any more.
  void forget_unneeded();

 private:
  void leave_to_tensors(const LivingMemory& living);

  intercept::Owner& owner_;
  const std::shared_ptr<Account> account_ = std::make_shared<Account>();
  Log log_;
  std::vector<std::weak_ptr<Memory>> memories_;
};

}  // namespace lockstep::deferred
