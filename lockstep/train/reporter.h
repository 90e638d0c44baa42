// What a run tells the world: the progress bar, metrics in files, the picture of its loss.
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

// Seconds of one step on this rank. Backward holds the exchange of gradients, and with it the wait
// for ranks that come later.
struct StepTimes {
  double data = 0;
  double forward = 0;
  double backward = 0;
  double update = 0;
};

// Gives the time since it was last asked to one part after the other. Waits for a CUDA
// device first: it computes on after calls return.
class PartClock {
 public:
  explicit PartClock(c10::Device device);

  void add_to(double& part);

 private:
  c10::Device device_;
  std::chrono::steady_clock::time_point since_;
};

// Finds ranks that are slow. Every rank makes one and calls it around each step. A rank's own time
// of a step is the step's without the wait for others; every few steps the ranks add theirs up, in
// one sum of a few numbers, and compare those of one pipeline stage.
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

struct StepReport {
  double loss = 0;
  double count = 0;  // tokens or samples of the step
  double gradient_norm = 0;
  double learning_rate = 0;
  double loss_scale = 0;               // of fp16
  std::int64_t skipped_steps = 0;      // so far
  std::optional<double> memory_bytes;  // the most that tensors took on the main rank's GPU so far
  std::optional<StepTimes> times;
};

// Only the main rank has one. Ownership: of its files. Threading: one thread. Failure: files that
// cannot be written cost their metrics and a warning, never the run.
class Reporter {
 public:
  struct Run {
    std::int64_t total_steps = 0;
    std::int64_t resumed_after = 0;  // 0: from the start
    Counted counted = Counted::samples;
    bool scales_loss = false;
    bool on_gpu = false;
    double peak_flops = 0;  // of the devices of all ranks together; 0 where it is not known
  };

  Reporter(const TrainerOptions& options, const Run& run);

  // The time from here to the next step() counts for the rate; what lies between does not.
  void begin_steps();
  void step(std::int64_t step, const StepReport& report);
  void validation(std::int64_t step, double loss, std::span<const observe::Metric> metrics);
  // A line above the bar.
  void note(const std::string& text);

  // Files on disk, the curve drawn, the bar left as it is.
  void finish();

  // As ProgressBar::error(); 0 where there is no bar.
  int output_error() const { return bar_ ? bar_->error() : 0; }

  // Over the whole run, without validation and saving.
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
