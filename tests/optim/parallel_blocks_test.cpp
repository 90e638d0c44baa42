#include <lockstep/optim/parallel_blocks.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "tensors.h"

namespace lockstep::optim {
namespace {

struct Seen {
  std::map<std::int64_t, std::tuple<std::size_t, std::int64_t, std::int64_t>> blocks;
  std::set<std::thread::id> threads;
  bool twice = false;
};

Seen run(const std::vector<std::int64_t>& counts, std::int64_t block_elements) {
  Seen seen;
  std::mutex mutex;
  parallel_blocks(counts, block_elements, [&](const Block& block) {
    const std::lock_guard lock(mutex);
    seen.threads.insert(std::this_thread::get_id());
    seen.twice |=
        !seen.blocks.emplace(block.number, std::tuple(block.range, block.begin, block.count))
             .second;
  });
  return seen;
}

TEST(ParallelBlocks, EveryElementOnceWhateverTheThreads) {
  const std::vector<std::int64_t> counts = {0, 1, 10, 0, 0, 29, 30, 31, 100003, 0, 7, 0};
  for (const int num_threads : {1, 2, 3, 4}) {
    const Threads threads(num_threads);
    for (const std::int64_t block_elements : {1, 10, 32768}) {
      const Seen seen = run(counts, block_elements);
      EXPECT_FALSE(seen.twice);
      std::int64_t number = 0;
      for (std::size_t range = 0; range < counts.size(); ++range)
        for (std::int64_t begin = 0; begin < counts[range]; begin += block_elements) {
          const auto expected =
              std::tuple(range, begin, std::min(block_elements, counts[range] - begin));
          ASSERT_TRUE(seen.blocks.contains(number));
          EXPECT_EQ(seen.blocks.at(number++), expected);
        }
      EXPECT_EQ(seen.blocks.size(), static_cast<std::size_t>(number));
    }
  }
}

TEST(ParallelBlocks, NothingToDo) {
  EXPECT_TRUE(run({}, 10).blocks.empty());
  EXPECT_TRUE(run({0, 0}, 10).blocks.empty());
}

TEST(ParallelBlocks, UsesLibTorchsThreads) {
  const std::vector<std::int64_t> counts = {1 << 20};
  {
    const Threads threads(1);
    EXPECT_EQ(run(counts, 4096).threads.size(), 1u);
  }
  const Threads threads(3);
  EXPECT_EQ(run(counts, 4096).threads.size(), 3u);
  // This is too little work to share.
  EXPECT_EQ(run({32768}, 4096).threads.size(), 1u);
}

}  // namespace
}  // namespace lockstep::optim
