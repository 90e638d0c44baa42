// What a constructor did through pointers that it had better not: the tensors whose memory it used
// while their values were put off.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>

namespace lockstep::deferred {

struct Memory;

// Of one Construction. Nobody can tell which thread used a memory: where several constructors run
// at once, what one of them did is known to all. Threading: any.
class Touches {
 public:
  // Remembers nothing while no constructor runs. Takes no memory, as it is called where memory
  // goes.
  void note(std::shared_ptr<const Memory> memory) {
    const std::lock_guard lock(mutex_);
    if (num_constructors_ > 0 && !first_) first_ = std::move(memory);
  }

  // The first memory to be noted since a constructor began when no other ran; null without one.
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

// A constructor runs for as long as this is there.
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

}  // namespace lockstep::deferred
