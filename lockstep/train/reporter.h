// The output of a run: the progress bar, metrics in files, the picture of its loss.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include <lockstep/distributed/distributed.h>
#include <lockstep/distributed/rank_messages.h>
#include <lockstep/observe/metrics.h>
#include <lockstep/observe/progress_bar.h>
#include <lockstep/observe/slow_ranks.h>
#include <lockstep/train/options.h>
#include <lockstep/train/task.h>

namespace lockstep::train {

// Seconds of one step on this rank. `backward` includes the exchange of gradients, and so the wait
// for ranks that come later.
struct StepTimes {
  double data = 0;
  double forward = 0;
  double backward = 0;
  double update = 0;
};

// The most memory that tensors of this rank took on its GPU so far; nothing on a CPU.
std::optional<double> peak_memory(c10::Device device);

// Adds the time since its last call to one part after the other. Waits for a CUDA device first,
// which computes on after calls return.
class PartClock {
 public:
  explicit PartClock(c10::Device device);

  void add_to(double& part);

 private:
  c10::Device device_;
  std::chrono::steady_clock::time_point since_;
};

// Finds ranks that are slow. Every rank makes one and calls it around each step. A rank's own time
// of a step is the step's time without the wait for others. Every few steps the ranks exchange
// their times, in one sum of a few numbers, and compare those of one pipeline stage.
//
// Ownership: shares the world. Threading: one thread. Failure: CommError.
class RankSpeeds {
 public:
  explicit RankSpeeds(const DistributedManager& dist);

  void begin_step();
  // Returns news on the main rank, in words: a rank that has become slow, or is no longer slow.
  std::vector<std::string> end_step(std::int64_t step);

 private:
  static constexpr std::size_t kStepsTogether = 5;

  std::shared_ptr<comm::Communicator> world_;
  RankMessages ranks_;
  std::vector<observe::SlowRanks> stages_;  // used on the main rank
  std::vector<std::vector<int>> ranks_of_stages_;
  std::vector<double> own_seconds_;  // own time of the steps since the last exchange
  std::chrono::steady_clock::time_point began_;
  double waited_before_ = 0;
};

struct StepReport {
  double loss = 0;
  double count = 0;  // tokens or samples in the step
  double gradient_norm = 0;
  double learning_rate = 0;
  double loss_scale = 0;               // fp16's loss scale
  std::int64_t skipped_steps = 0;      // so far
  std::optional<double> memory_bytes;  // the most that tensors took on the main rank's GPU so far
  std::optional<StepTimes> times;
};

// Only the main rank has one. Ownership: owns its files. Threading: one thread. Failure: a file
// that cannot be written costs its metrics and a warning, never the run.
class Reporter {
 public:
  struct Run {
    std::int64_t total_steps = 0;
    std::int64_t resumed_after = 0;  // 0: from the start
    Counted counted = Counted::samples;
    bool scales_loss = false;
    bool on_gpu = false;
    double peak_flops = 0;  // of all ranks' devices together; 0 if not known
  };

  Reporter(const TrainerOptions& options, const Run& run);

  // The time from here to the next step() counts for the rate; other time does not.
  void begin_steps();
  void step(std::int64_t step, const StepReport& report);
  void validation(std::int64_t step, double loss, std::span<const observe::Metric> metrics);
  // Prints a line above the bar.
  void note(const std::string& text);

  // Writes the files to disk, draws the curve and leaves the bar as it is.
  void finish();

  // As ProgressBar::error(); 0 if there is no bar.
  int output_error() const { return bar_ ? bar_->error() : 0; }

  // The rate of the whole run, without validation and saving.
  double mean_rate() const;

 private:
  void add_files();
  bool tells_share_of_peak() const { return run_.peak_flops > 0 && options_.flops_per_unit > 0; }

  const TrainerOptions& options_;
  Run run_;
  observe::Metrics metrics_;
  std::optional<observe::ProgressBar> bar_;
  observe::Throughput recent_{std::chrono::seconds(5)};
  observe::Throughput whole_{std::chrono::hours(24 * 365)};
  Clock::time_point start_;
  std::optional<double> validation_loss_;
};

}  // namespace lockstep::train
