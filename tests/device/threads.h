// Changes LibTorch's number of threads for a while.
#pragma once

#include <ATen/Parallel.h>

namespace lockstep {

// Restores the former number of threads.
class Threads {
 public:
  explicit Threads(int count) : before_(at::get_num_threads()) { at::set_num_threads(count); }
  ~Threads() { at::set_num_threads(before_); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

 private:
  int before_;
};

}  // namespace lockstep
