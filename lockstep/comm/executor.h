// Runs the calls of one group, one at a time and in order, in a thread of its own or in the thread
// that waits for them, whichever comes first.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include <lockstep/base/deadline.h>
#include <lockstep/comm/call.h>

namespace lockstep::comm {

// One call: what to run, and how it went.
class Job {
 public:
  explicit Job(Deadline deadline) : deadline_(deadline) {}
  virtual ~Job() = default;
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

 private:
  friend class Executor;

  // May throw whatever it likes.
  virtual void run() = 0;
  // Called once, run or not, before anyone hears that it is done: gives back what the job holds.
  virtual void let_go() noexcept = 0;

  Deadline deadline_;
  bool done_ = false;
  std::exception_ptr error_;
};

// Thread-safe. After a job has thrown, all later ones fail with the same error without being run.
class Executor {
 public:
  // `on_failure` is called once, in the thread that ran the failing job, before anyone hears of it.
  // `on_waited`, where given, is told how long each wait took that was not over at once; it must
  // not call back.
  explicit Executor(std::function<void(std::exception_ptr)> on_failure,
                    std::function<void(Clock::duration)> on_waited = nullptr);
  ~Executor();

  // Runs what is still queued and ends the thread; nothing may be submitted afterwards.
  void finish();

  void submit(const std::shared_ptr<Job>& job, Launch launch);

  bool done(const Job& job) const;
  // Whether nothing is queued, and nothing runs.
  bool idle() const;

  // Throws what the job threw. At the deadline throws nothing and returns false.
  bool wait(Job& job, Deadline deadline);

  // Fails everything queued from now on; what runs now is not interrupted. `meanwhile` runs when
  // no job does.
  void fail(std::exception_ptr error, const std::function<void()>& meanwhile);

 private:
  void start_thread();
  void run_in_background();
  void work();
  void run_next(std::unique_lock<std::mutex>& lock);
  bool wait_until_done(Job& job, Deadline deadline, std::unique_lock<std::mutex>& lock);

  std::function<void(std::exception_ptr)> on_failure_;
  std::function<void(Clock::duration)> on_waited_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Job>> queue_;
  std::exception_ptr failure_;
  bool running_ = false;   // some thread runs a job
  int in_background_ = 0;  // queued jobs that the thread should run
  bool stopping_ = false;
  std::thread thread_;  // started by the first job that needs it
};

}  // namespace lockstep::comm
