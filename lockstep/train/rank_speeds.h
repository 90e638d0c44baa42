// How long each rank's own part of a step takes, and which ranks are slow.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include <lockstep/distributed/distributed.h>
#include <lockstep/distributed/rank_messages.h>
#include <lockstep/observe/slow_ranks.h>

namespace lockstep::train {

// Every rank makes one and calls it around each step. A step's time without what the rank waited
// for others in it is its own; every few steps all ranks' are brought together, in one sum of a few
// numbers, and compared among those of one pipeline stage.
//
// Ownership: shares the world. Threading: one thread. Failure: CommError.
class RankSpeeds {
 public:
  explicit RankSpeeds(const DistributedManager& dist);

  void begin_step();
  // What is new, in words, on the main rank: a rank that is slow, or well again.
  std::vector<std::string> end_step(std::int64_t step);

 private:
  static constexpr std::size_t kStepsTogether = 5;

  std::shared_ptr<comm::Communicator> world_;
  RankMessages ranks_;
  std::vector<observe::SlowRanks> stages_;  // of the main rank
  std::vector<std::vector<int>> ranks_of_stages_;
  std::vector<double> own_seconds_;  // of the steps since they were last brought together
  std::chrono::steady_clock::time_point began_;
  double waited_before_ = 0;
};

}  // namespace lockstep::train
