// Threads that run jobs which block: as many as there are jobs at once, kept for the next ones.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace lockstep::comm::engines {

// Jobs start in the order they come; with `most` = 1 they also run one after the other. Jobs must
// not throw. The destructor runs what is queued and waits for all of it.
class WorkerPool {
 public:
  explicit WorkerPool(std::size_t most) : most_(most) {}
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  void submit(std::function<void()> job);

 private:
  void work();

  const std::size_t most_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  std::vector<std::thread> threads_;
  std::size_t idle_ = 0;
  bool stopping_ = false;
};

}  // namespace lockstep::comm::engines
