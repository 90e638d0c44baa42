#include <lockstep/base/on_threads.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace lockstep {

void on_threads(std::size_t count, int num_threads, const std::function<void(std::size_t)>& work) {
  std::atomic<std::size_t> next{0};
  std::mutex mutex;
  std::size_t failed = count;  // the first that did; under the mutex
  std::exception_ptr failure;
  const auto run = [&] {
    for (std::size_t i = next++; i < count; i = next++) {
      try {
        work(i);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (i < failed) {
          failed = i;
          failure = std::current_exception();
        }
        next = count;
      }
    }
  };
  std::vector<std::jthread> others;
  const auto wanted = std::min(static_cast<std::size_t>(std::max(num_threads, 1)), count);
  try {
    while (others.size() + 1 < wanted) others.emplace_back(run);
  } catch (const std::system_error&) {
    // The system gives no more threads: the ones that have started do the work.
  }
  run();
  others.clear();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace lockstep
