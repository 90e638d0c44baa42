// Numbers of this process's threads, for reports of which thread waits.
#pragma once

#include <cstdint>

namespace lockstep {

// A number for the calling thread that no other thread of this process ever has; not 0.
std::uint64_t this_thread_number();

// While it lives, the calling thread has the number of another one, for which it works and which
// waits for it.
class [[nodiscard]] ThreadNumberScope {
 public:
  explicit ThreadNumberScope(std::uint64_t number);
  ~ThreadNumberScope();
  ThreadNumberScope(const ThreadNumberScope&) = delete;
  ThreadNumberScope& operator=(const ThreadNumberScope&) = delete;

 private:
  std::uint64_t outer_;
};

}  // namespace lockstep
