// How every program here measures: batches of calls back to back, and the median batch, so that a
// moment in which the machine did something else does not count.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace lockstep::bench {

// The sizes of calls as nccl-tests count them: bytes of the whole buffer on one rank. `argument` is
// the program's, for the largest size in MiB.
inline std::vector<std::size_t> sizes_up_to(const char* argument) {
  const std::size_t largest =
      argument != nullptr ? std::strtoull(argument, nullptr, 10) << 20 : 128u << 20;
  std::vector<std::size_t> sizes;
  for (std::size_t kib : {4, 64, 256, 1024, 4096, 16384, 65536, 131072})
    if (kib << 10 <= largest) sizes.push_back(kib << 10);
  return sizes;
}

// About this many bytes pass through all calls of one size together. compare.py sets it if the
// network is slow; every rank has to make as many calls as the others.
inline std::size_t bytes_in_all() {
  const char* mib = std::getenv("BENCH_MIB_IN_ALL");
  return mib != nullptr ? std::strtoull(mib, nullptr, 10) << 20 : 256u << 20;
}

template <typename Call>
double median_microseconds(std::size_t bytes, Call call) {
  using Clock = std::chrono::steady_clock;
  // At least a handful of calls, at most a thousand.
  const std::size_t calls =
      std::clamp<std::size_t>(bytes_in_all() / std::max<std::size_t>(bytes, 1), 5, 1000);
  const std::size_t per_batch = std::max<std::size_t>(calls / 10, 1);
  for (std::size_t i = 0; i < std::max<std::size_t>(per_batch, 3); ++i) call();
  std::vector<double> batches;
  for (std::size_t done = 0; done < calls; done += per_batch) {
    const auto begin = Clock::now();
    for (std::size_t i = 0; i < per_batch; ++i) call();
    batches.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count() /
                      static_cast<double>(per_batch));
  }
  std::nth_element(batches.begin(),
                   batches.begin() + static_cast<std::ptrdiff_t>(batches.size() / 2),
                   batches.end());
  return batches[batches.size() / 2];
}

// Prints one line of JSON for compare.py.
inline void report(const std::string& who, const std::string& operation, int ranks,
                   std::size_t bytes, double microseconds) {
  std::printf("{\"who\": \"%s\", \"op\": \"%s\", \"ranks\": %d, \"bytes\": %zu, \"us\": %.3f}\n",
              who.c_str(), operation.c_str(), ranks, bytes, microseconds);
  std::fflush(stdout);
}

}  // namespace lockstep::bench
