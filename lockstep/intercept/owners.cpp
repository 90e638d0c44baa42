#include <lockstep/intercept/owners.h>

#include <algorithm>
#include <mutex>

#include <lockstep/base/error.h>

namespace lockstep::intercept {

Owners& Owners::instance() {
  static Owners* const all = new Owners;  // outlives every thread that still computes
  return *all;
}

void Owners::add(const c10::Storage& memory, const std::shared_ptr<Owner>& owner,
                 std::string when_gone) {
  const std::unique_lock lock(mutex_);
  if (memories_.size() >= look_for_the_dead_at_) {
    std::erase_if(memories_, [](const auto& item) { return item.second.lives.expired(); });
    look_for_the_dead_at_ = 2 * memories_.size() + 16;
  }
  const auto [place, added] = memories_.try_emplace(
      memory.unsafeGetStorageImpl(),
      Memory{c10::weak_intrusive_ptr<c10::StorageImpl>(memory.getWeakStorageImpl()), {}});
  auto& entries = place->second.entries;
  std::erase_if(entries, [&](const Entry& entry) { return entry.address == owner.get(); });
  entries.push_back({owner, owner.get(), std::move(when_gone)});
}

void Owners::remove(const c10::Storage& memory, const Owner* owner) {
  const std::unique_lock lock(mutex_);
  const auto found = memories_.find(memory.unsafeGetStorageImpl());
  if (found == memories_.end()) return;
  std::erase_if(found->second.entries, [&](const Entry& entry) { return entry.address == owner; });
  if (found->second.entries.empty()) memories_.erase(found);
}

void Owners::find(const c10::StorageImpl* memory,
                  std::vector<std::shared_ptr<Owner>>& owners) const {
  const std::shared_lock lock(mutex_);
  const auto found = memories_.find(memory);
  if (found == memories_.end()) return;
  for (const Entry& entry : found->second.entries) {
    if (auto owner = entry.owner.lock()) {
      if (std::ranges::find(owners, owner) == owners.end()) owners.push_back(std::move(owner));
    } else if (!entry.when_gone.empty()) {
      throw UsageError("{}", entry.when_gone);
    }
  }
}

bool Owners::owns(const c10::StorageImpl* memory, const Owner* owner) const {
  const std::shared_lock lock(mutex_);
  const auto found = memories_.find(memory);
  return found != memories_.end() &&
         std::ranges::any_of(found->second.entries,
                             [&](const Entry& entry) { return entry.address == owner; });
}

}  // namespace lockstep::intercept
