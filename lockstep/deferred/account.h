// How much memory the tensors of one Construction take, counted where it is taken.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>

namespace lockstep::deferred {

// Threading: any.
class Account {
 public:
  void take(std::size_t bytes) {
    const std::size_t now = bytes_.fetch_add(bytes) + bytes;
    std::size_t peak = peak_bytes_.load();
    while (peak < now && !peak_bytes_.compare_exchange_weak(peak, now)) {
    }
  }
  void give_back(std::size_t bytes) { bytes_.fetch_sub(bytes); }

  std::size_t bytes() const { return bytes_.load(); }
  std::size_t peak_bytes() const { return peak_bytes_.load(); }

 private:
  std::atomic<std::size_t> bytes_ = 0;
  std::atomic<std::size_t> peak_bytes_ = 0;
};

// Memory that is taken for as long as this is there.
class Taken {
 public:
  Taken(Account& account, std::size_t bytes) : account_(account), bytes_(bytes) {
    account_.take(bytes_);
  }
  ~Taken() { account_.give_back(bytes_); }
  Taken(const Taken&) = delete;
  Taken& operator=(const Taken&) = delete;

 private:
  Account& account_;
  std::size_t bytes_;
};

}  // namespace lockstep::deferred
