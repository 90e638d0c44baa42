#include "ranks.h"

#include <numeric>
#include <thread>

#include <gtest/gtest.h>

namespace lockstep::comm::backends {

void run_ranks(int size, const std::function<void(int rank)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      SCOPED_TRACE("rank " + std::to_string(rank));
      try {
        body(rank);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << " throws: " << error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
}

GroupInfo group_info(const std::string& name, int rank, int size) {
  GroupInfo info{.name = name, .rank = rank};
  info.global_ranks.resize(static_cast<std::size_t>(size));
  std::iota(info.global_ranks.begin(), info.global_ranks.end(), 0);
  return info;
}

}  // namespace lockstep::comm::backends
