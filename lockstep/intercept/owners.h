// Who owns which memory. The dispatcher calls plain functions, so this is one for the process.
#pragma once

#include <cstddef>
#include <memory>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include <c10/core/Storage.h>

#include <lockstep/intercept/owner.h>

namespace lockstep::intercept {

// Threading: any. An entry lasts until its memory's last user is gone, so that memory which comes
// to lie at the same address is never taken for it.
class Owners {
 public:
  static Owners& instance();

  void add(const c10::Storage& memory, const std::shared_ptr<Owner>& owner, std::string when_gone);
  void remove(const c10::Storage& memory, const Owner* owner);

  // Appends the owners of a memory that are not in the list yet. UsageError where one is gone that
  // was not to go first.
  void find(const c10::StorageImpl* memory, std::vector<std::shared_ptr<Owner>>& owners) const;
  bool owns(const c10::StorageImpl* memory, const Owner* owner) const;

 private:
  struct Entry {
    std::weak_ptr<Owner> owner;
    const Owner* address = nullptr;
    std::string when_gone;
  };
  struct Memory {
    c10::weak_intrusive_ptr<c10::StorageImpl> lives;
    std::vector<Entry> entries;
  };

  mutable std::shared_mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, Memory> memories_;
  // Not at every add(), which would take the square of the time that so many of them take.
  std::size_t look_for_the_dead_at_ = 0;
};

}  // namespace lockstep::intercept
