#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/base/on_threads.h>

namespace lockstep {
namespace {

TEST(OnThreads, EachIsDoneOnce) {
  for (const int threads : {0, 1, 3, 50})
    for (const std::size_t count : {0u, 1u, 2u, 20u}) {
      std::vector<std::atomic<int>> times(count);
      on_threads(count, threads, [&](std::size_t i) { ++times[i]; });
      for (const auto& time : times) EXPECT_EQ(time, 1);
    }
}

TEST(OnThreads, TheFirstFailureIsThrown) {
  for (const int threads : {1, 4}) {
    try {
      on_threads(100, threads, [&](std::size_t i) {
        if (i >= 10) throw std::runtime_error(std::to_string(i));
      });
      FAIL() << "nothing was thrown";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "10");
    }
  }
}

}  // namespace
}  // namespace lockstep
