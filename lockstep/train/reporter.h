// The output of a run: its folder, lines for people, the progress bar, metrics in files, the
// picture of its loss.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <c10/core/Device.h>
#include <spdlog/fmt/fmt.h>

#include <lockstep/base/file.h>
#include <lockstep/base/folder_lock.h>
#include <lockstep/distributed/distributed.h>
#include <lockstep/distributed/rank_messages.h>
#include <lockstep/observe/metrics.h>
#include <lockstep/observe/progress_bar.h>
#include <lockstep/observe/slow_ranks.h>
#include <lockstep/train/config/config.h>
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

// The job's generation that this process belongs to.
FolderHolder this_generation();

class RunFolder {
 public:
  explicit RunFolder(const TrainerOptions& options) : options_(options) {}

  // Makes the folder if it is missing, and keeps other runs out as long as the lock lives. A lock
  // of an earlier generation of this job is taken over. UsageError if another run uses the folder,
  // FileError if nothing can be written.
  std::shared_ptr<const FolderLock> claim() const;

  // The run's config, resolved: to read, and to train with again.
  std::filesystem::path config() const { return options_.output / "config.json"; }
  std::filesystem::path checkpoints() const { return options_.output / "checkpoints"; }
  // Whether anything says where metrics are.
  bool has_metrics() const { return !options_.output.empty() || !options_.csv_folder.empty(); }
  bool has_tensorboard() const {
    return !options_.output.empty() || !options_.tensorboard_folder.empty();
  }
  std::filesystem::path best() const { return options_.output / "best"; }
  std::filesystem::path metrics() const {
    return (options_.csv_folder.empty() ? options_.output : options_.csv_folder) / "metrics.csv";
  }
  std::filesystem::path tensorboard() const {
    return options_.tensorboard_folder.empty() ? options_.output / "tensorboard"
                                               : options_.tensorboard_folder;
  }
  std::filesystem::path curve() const { return options_.output / "loss.svg"; }

 private:
  const TrainerOptions& options_;
};

// Prints lines about the run, on the main rank.
class Speaker {
 public:
  Speaker(const DistributedManager& dist, int fd) : fd_(dist.is_main() ? fd : -1) {}

  template <typename... Args>
  void operator()(fmt::format_string<Args...> format, Args&&... args) {
    if (fd_ < 0) return;
    const std::string line = fmt::format(format, std::forward<Args>(args)...) + "\n";
    for (std::string_view rest = line; !rest.empty();) {
      const ssize_t written = ::write(fd_, rest.data(), rest.size());
      if (written >= 0) {
        rest.remove_prefix(static_cast<std::size_t>(written));
      } else if (errno != EINTR) {
        // If the stream takes no bytes for now, only this line is lost.
        if (errno != EAGAIN) error_ = errno;
        return;
      }
    }
  }

  // Where a file is, if it is there.
  void file(const char* what, const std::filesystem::path& path) {
    if (is_there(path)) (*this)("{:<8} {}", what, path.string());
  }

  // As ProgressBar::error().
  int error() const { return error_; }

 private:
  int fd_;
  int error_ = 0;
};

// How a run has ended; `note` follows the losses.
void say_end(Speaker& say, const TrainConfig& config, const TrainingResult& result,
             const std::string& note = "");
// Where its files are.
void say_files(Speaker& say, const TrainerOptions& options, const TrainingResult& result);
// The result, with what could not be said.
TrainingResult said_at_the_end(Speaker& say, TrainingResult result);

}  // namespace lockstep::train
