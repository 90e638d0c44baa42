// Which ranks take longer for their own part of a step than the others do for theirs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace lockstep::observe {

// Ranks that train together end every step together, so step times name nobody: what tells is the
// time that a rank spends outside of calls that wait for others. In each step a rank is compared
// with the median of the others, so that steps may differ; it must be slow in two thirds of the
// last steps, so that noise and pauses (a checkpoint, a page fault, a neighbour's job) name nobody.
// Steps shorter than `least_seconds` are taken together until they last that long: a system that
// gives a core to others for a few milliseconds slows down ten of them in a row.
// Only ranks that do the same work can be compared: of a pipeline, those of one stage.
//
// Not thread-safe. Deterministic: ranks that are fed the same say the same.
class SlowRanks {
 public:
  // A step counts as slow from `slow` times the others' time on; a rank is well again when half of
  // its steps are below `well` times. A difference of less than `worth_seconds` a step is not worth
  // a word.
  struct Options {
    double slow = 1.5;
    double well = 1.2;
    double worth_seconds = 0.002;
  };

  // What is new about a rank.
  struct News {
    enum class Kind : std::uint8_t { slow, well_again };
    Kind kind = Kind::slow;
    int rank = 0;
    double ratio = 0;           // of the next two
    double seconds = 0;         // its own part of a step
    double others_seconds = 0;  // and the others'
    std::uint64_t step = 0;     // in which it was noticed

    // "rank 5 is slow: its own part of a step takes 0.41 s, that of the others 0.21 s (2.0 times)"
    std::string text() const;
  };

  // `ranks` are the names of those that are compared, in the order of the times.
  // UsageError for fewer than two, or for options that contradict each other.
  explicit SlowRanks(std::vector<int> ranks) : SlowRanks(std::move(ranks), Options()) {}
  SlowRanks(std::vector<int> ranks, Options options);

  // One step: `seconds[i]` is what ranks[i] took outside of waiting; 0 or less, or no number, where
  // it is not known. Each rank is told of once, and once more when it is well again. UsageError
  // where there is not one number for each rank.
  std::vector<News> step(std::uint64_t step, std::span<const double> seconds);

  // Those that are slow now.
  std::vector<int> slow() const;

  // Steps that are looked at: a rank that turns slow is named after two thirds of them, one that
  // always was after all.
  static constexpr std::size_t num_steps = 15;
  static constexpr double least_seconds = 0.02;  // of the others' part

 private:
  // The means of one step, or of several short ones.
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
