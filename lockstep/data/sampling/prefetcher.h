// Loading ahead in threads, and how much of the steps' time is spent waiting for data all the same.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/base/error.h>

namespace lockstep::data {

// Calls make(0), make(1), … make(count - 1), each in one of `num_workers` threads, and never more
// than `ahead` items beyond those that were taken.
//
// Threading: one thread takes; `make` must be thread-safe. Failure: the take of item k throws what
// make(k) threw, and so does every later one. It can be destroyed at any time: it begins nothing
// more, and waits for items that are being made and drops them.
template <typename Item>
class Prefetcher {
 public:
  using Make = std::function<Item(std::int64_t)>;

  Prefetcher(Make make, std::int64_t count, int num_workers, std::int64_t ahead)
      : make_(std::move(make)), count_(count), places_(static_cast<std::size_t>(ahead)) {
    LOCKSTEP_CHECK(num_workers > 0 && ahead > 0);
    for (int i = 0; i < num_workers; ++i)
      workers_.emplace_back([this](const std::stop_token& stop) { work(stop); });
  }

  // All are told before any is waited for.
  ~Prefetcher() {
    for (std::jthread& worker : workers_) worker.request_stop();
  }
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  // Returns the next item as soon as it is made; nothing after the last.
  std::optional<Item> take() {
    std::unique_lock lock(mutex_);
    if (taken_ == count_) return std::nullopt;
    Place& place = place_of(taken_);
    made_.wait(lock, [&] { return place.item || place.error; });
    if (place.error) std::rethrow_exception(place.error);
    std::optional<Item> item = std::exchange(place.item, std::nullopt);
    ++taken_;
    lock.unlock();
    room_.notify_one();
    return item;
  }

 private:
  struct Place {
    std::optional<Item> item;
    std::exception_ptr error;
  };

  Place& place_of(std::int64_t number) {
    return places_[static_cast<std::size_t>(number) % places_.size()];
  }

  void work(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    while (room_.wait(
        lock, stop, [this] { return begun_ == count_ || begun_ - taken_ < std::ssize(places_); })) {
      if (stop.stop_requested() || begun_ == count_) return;
      const std::int64_t number = begun_++;
      lock.unlock();
      Place result = make_guarded(number);
      lock.lock();
      place_of(number) = std::move(result);
      made_.notify_one();
    }
  }

  Place make_guarded(std::int64_t number) const {
    try {
      return {make_(number), nullptr};
    } catch (...) {
      return {std::nullopt, std::current_exception()};
    }
  }

  const Make make_;
  const std::int64_t count_;
  std::mutex mutex_;
  std::condition_variable_any room_;  // for workers: something may be begun
  std::condition_variable made_;      // for the taker
  std::vector<Place> places_;         // number k at k mod their number
  std::int64_t begun_ = 0;
  std::int64_t taken_ = 0;
  std::vector<std::jthread> workers_;  // last: ends before what it uses
};

// How much of the steps' time goes into waiting for data. Looks at the last steps only, so that a
// slow start is forgotten. Not thread-safe.
class StarvationMeter {
 public:
  // A step that took `whole`, `waited` of it for its data.
  void step(Clock::duration waited, Clock::duration whole);

  // The share of the last steps' time that was waited, 0 to 1; 0 before any step.
  double share() const;

  // Whether the user should hear of it: true once, when over enough steps the share is too large
  // and the time lost is worth a word.
  bool should_warn();

  static constexpr std::size_t least_steps = 20;
  static constexpr std::size_t most_steps = 50;  // that are looked at
  static constexpr double tolerated_share = 0.2;
  static constexpr std::chrono::milliseconds worth_a_word{100};

 private:
  struct Step {
    Clock::duration waited;
    Clock::duration whole;
  };

  Step sum() const;

  std::vector<Step> steps_;  // a ring once it is full
  std::size_t next_ = 0;
  bool warned_ = false;
};

}  // namespace lockstep::data
