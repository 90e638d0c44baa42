// The job that every program here trains, and how it is timed; pytorch.py has the same numbers.
#pragma once

#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::bench {

// A GPT-2 of 10.9 M parameters.
inline constexpr std::int64_t kVocabulary = 512;
inline constexpr std::int64_t kWidth = 384;
inline constexpr std::int64_t kLayers = 6;
inline constexpr std::int64_t kHeads = 6;
inline constexpr std::int64_t kTokens = 256;
inline constexpr std::int64_t kBatch = 4;
inline constexpr double kLearningRate = 3e-4;
inline constexpr double kBeta1 = 0.9;
inline constexpr double kBeta2 = 0.95;
inline constexpr double kWeightDecay = 0.1;

struct StepCount {
  int warm_up = 3;
  int timed = 10;
};

// Reads from the arguments, beginning with `first`, how many steps to time and how many to run
// before.
inline StepCount step_count(int argc, char** argv, int first) {
  StepCount count;
  if (argc > first) count.timed = std::max(1, std::atoi(argv[first]));
  if (argc > first + 1) count.warm_up = std::max(0, std::atoi(argv[first + 1]));
  return count;
}

// Times the phases of steps, in wall time and in this process's CPU time, which other programs on
// the machine disturb less.
class StepClock {
 public:
  enum Phase { forward, backward, update, kPhases };

  void begin() {
    begun_ = at_ = now();
    cpu_ = cpu_milliseconds();
  }
  void end_of(Phase phase) {
    const double time = now();
    phases_.at(phase).push_back(time - std::exchange(at_, time));
  }
  void end() {
    wall_.push_back(now() - begun_);
    all_cpu_.push_back(cpu_milliseconds() - cpu_);
  }

  // Milliseconds of every step.
  const std::vector<double>& wall() const { return wall_; }
  const std::vector<double>& cpu() const { return all_cpu_; }

  // Prints one line of JSON for compare.py, without the steps of the warm-up.
  void report(const std::string& who, int rank, int ranks, const StepCount& count,
              double loss) const {
    std::string line = "{\"who\": \"" + who + "\", \"rank\": " + std::to_string(rank) +
                       ", \"ranks\": " + std::to_string(ranks) +
                       ", \"loss\": " + std::to_string(loss);
    const auto add = [&](const char* name, const std::vector<double>& times) {
      line += std::string(", \"") + name + "\": [";
      for (auto step = static_cast<std::size_t>(count.warm_up); step < times.size(); ++step)
        line += (step == static_cast<std::size_t>(count.warm_up) ? "" : ", ") +
                std::to_string(times[step]);
      line += "]";
    };
    add("ms", wall_);
    add("cpu_ms", all_cpu_);
    add("forward_ms", phases_[forward]);
    add("backward_ms", phases_[backward]);
    add("update_ms", phases_[update]);
    std::printf("%s}\n", line.c_str());
    std::fflush(stdout);
  }

 private:
  static double now() {
    const auto time = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double, std::milli>(time).count();
  }
  // The CPU time of all threads of this process.
  static double cpu_milliseconds() {
    rusage used{};
    getrusage(RUSAGE_SELF, &used);
    const auto milliseconds = [](const timeval& time) {
      return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_usec) / 1e3;
    };
    return milliseconds(used.ru_utime) + milliseconds(used.ru_stime);
  }

  double begun_ = 0, at_ = 0, cpu_ = 0;
  std::vector<double> wall_, all_cpu_;
  std::array<std::vector<double>, kPhases> phases_;
};

}  // namespace lockstep::bench
