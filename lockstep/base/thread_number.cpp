#include <lockstep/base/thread_number.h>

#include <atomic>

namespace lockstep {

namespace {

std::uint64_t new_number() {
  static std::atomic<std::uint64_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

thread_local std::uint64_t number = new_number();

}  // namespace

std::uint64_t this_thread_number() { return number; }

ThreadNumberScope::ThreadNumberScope(std::uint64_t other) : outer_(number) { number = other; }

ThreadNumberScope::~ThreadNumberScope() { number = outer_; }

}  // namespace lockstep
