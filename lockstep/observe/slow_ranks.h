// Finds ranks that are slower than the others at their own part of a step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace lockstep::observe {

// Ranks that train together end every step at the same time, so step times are the same for all.
// Ranks are compared by the time that each spends outside of calls that wait for others. In each
// step a rank is compared with the median of the others, so steps may differ. A rank must be slow
// in two thirds of the last steps, so that noise and pauses (a checkpoint, a page fault, another
// job) are not reported. Steps shorter than `least_seconds` are added up until they last that long:
// a system that gives a core to others for a few milliseconds slows down ten short steps in a row.
// Only ranks that do the same work can be compared: in a pipeline, the ranks of one stage.
//
// Not thread-safe. Deterministic: the same times give the same news on every rank.
class SlowRanks {
 public:
  // A step counts as slow if it takes at least `slow` times the others' time; a rank is well again
  // when half of its steps are below `well` times. Differences of less than `worth_seconds` a step
  // are not reported.
  struct Options {
    double slow = 1.5;
    double well = 1.2;
    double worth_seconds = 0.002;
  };

  // A rank has become slow, or is well again.
  struct News {
    enum class Kind : std::uint8_t { slow, well_again };
    Kind kind = Kind::slow;
    int rank = 0;
    double ratio = 0;           // seconds / others_seconds
    double seconds = 0;         // its own part of a step
    double others_seconds = 0;  // and the others'
    std::uint64_t step = 0;     // in which it was noticed

    // "rank 5 is slow: its own part of a step takes 0.41 s, that of the others 0.21 s (2.0 times)"
    std::string text() const;
  };

  // `ranks` names the ranks that are compared, in the order of the times that step() gets.
  // UsageError for fewer than two, or for options that contradict each other.
  explicit SlowRanks(std::vector<int> ranks) : SlowRanks(std::move(ranks), Options()) {}
  SlowRanks(std::vector<int> ranks, Options options);

  // Adds a step: `seconds[i]` is the time that ranks[i] took outside of waiting; 0, less, or NaN
  // where it is not known. A rank is reported once when it becomes slow, and once when it is well
  // again. UsageError where there is not one number for each rank.
  std::vector<News> step(std::uint64_t step, std::span<const double> seconds);

  // The ranks that are slow now.
  std::vector<int> slow() const;

  // How many steps are looked at. A rank that becomes slow is reported after two thirds of them,
  // one that was slow from the start after all of them.
  static constexpr std::size_t num_steps = 15;
  static constexpr double least_seconds = 0.02;  // of the others' time

 private:
  // The mean times of one step, or of several short ones.
  struct Sample {
    double seconds = 0;
    double others = 0;
  };
  struct Rank {
    int name = 0;
    std::vector<Sample> samples;  // a ring once it is full
    std::size_t next = 0;
    Sample sum = {};  // of short steps that do not make a sample yet
    int num_summed = 0;
    bool slow = false;
  };

  std::vector<Rank> ranks_;
  Options options_;
};

}  // namespace lockstep::observe
