#include <lockstep/train/reporter.h>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <c10/core/impl/VirtualGuardImpl.h>

#include <lockstep/base/durable_file.h>
#include <lockstep/base/environment.h>
#include <lockstep/base/log.h>
#include <lockstep/device/cuda.h>
#include <lockstep/flight/journal.h>
#include <lockstep/net/secret.h>
#include <lockstep/observe/csv_file.h>
#include <lockstep/observe/loss_curve.h>
#include <lockstep/observe/tensorboard_file.h>
#include <lockstep/train/preflight/resume_check.h>

namespace lockstep::train {

namespace {

std::chrono::steady_clock::time_point time_on(c10::Device device) {
  if (device.is_cuda()) {
    const c10::impl::VirtualGuardImpl guard(device.type());
    guard.synchronizeStream(guard.getStream(device));
  }
  return std::chrono::steady_clock::now();
}

}  // namespace

std::optional<double> peak_memory(c10::Device device) {
  if (!device.is_cuda()) return std::nullopt;
  return static_cast<double>(device::gpu_peak_bytes(device.index()));
}

PartClock::PartClock(c10::Device device) : device_(device), since_(time_on(device)) {}

void PartClock::add_to(double& part) {
  const auto now = time_on(device_);
  part += std::chrono::duration<double>(now - std::exchange(since_, now)).count();
}

namespace {

// Groups the ranks that do the same work, which are those of one pipeline stage.
std::vector<std::vector<int>> stages_of(const mesh::MeshShape& shape) {
  const bool has_stages =
      std::ranges::find(shape.axes(), "pp", &mesh::Axis::name) != shape.axes().end();
  std::map<int, std::vector<int>> stages;
  for (int rank = 0; rank < shape.world_size(); ++rank)
    stages[has_stages ? shape.coordinate(rank, "pp") : 0].push_back(rank);
  std::vector<std::vector<int>> several;
  for (auto& [stage, ranks] : stages)
    if (ranks.size() > 1) several.push_back(std::move(ranks));
  return several;
}

}  // namespace

RankSpeeds::RankSpeeds(const DistributedManager& dist)
    : world_(dist.world()), ranks_(dist.world()) {
  if (!dist.is_main()) return;
  ranks_of_stages_ = stages_of(dist.mesh().shape());
  for (const std::vector<int>& ranks : ranks_of_stages_) stages_.emplace_back(ranks);
}

void RankSpeeds::begin_step() {
  began_ = std::chrono::steady_clock::now();
  waited_before_ = world_->journal().waited_seconds();
}

std::vector<std::string> RankSpeeds::end_step(std::int64_t step) {
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began_;
  own_seconds_.push_back(took.count() - (world_->journal().waited_seconds() - waited_before_));
  if (own_seconds_.size() < kStepsTogether) return {};
  const auto size = static_cast<std::size_t>(ranks_.size());
  std::vector<double> all(size * kStepsTogether);
  std::ranges::copy(own_seconds_,
                    all.begin() + static_cast<std::ptrdiff_t>(
                                      static_cast<std::size_t>(ranks_.rank()) * kStepsTogether));
  all = ranks_.sum(std::move(all));
  own_seconds_.clear();
  std::vector<std::string> news;
  for (std::size_t stage = 0; stage < stages_.size(); ++stage)
    for (std::size_t i = 0; i < kStepsTogether; ++i) {
      std::vector<double> seconds;
      for (const int rank : ranks_of_stages_[stage])
        seconds.push_back(all[static_cast<std::size_t>(rank) * kStepsTogether + i]);
      const auto number = static_cast<std::uint64_t>(step) - (kStepsTogether - 1 - i);
      for (const auto& one : stages_[stage].step(number, seconds)) news.push_back(one.text());
    }
  return news;
}

namespace {

const char* rate_unit(Counted counted) {
  return counted == Counted::tokens ? "tok/s" : "samples/s";
}

const char* rate_name(Counted counted) {
  return counted == Counted::tokens ? "tokens_per_second" : "samples_per_second";
}

std::vector<observe::Metric> metrics_of(const StepTimes& times) {
  return {{"data_seconds", times.data},
          {"forward_seconds", times.forward},
          {"backward_seconds", times.backward},
          {"update_seconds", times.update}};
}

}  // namespace

Reporter::Reporter(const TrainerOptions& options, const Run& run)
    : options_(options), run_(run), start_(Clock::now()) {
  add_files();
  if (options_.progress_fd >= 0)
    bar_.emplace(options_.progress_fd,
                 observe::ProgressBar::Options{.total_steps = run_.total_steps,
                                               .rate_unit = rate_unit(run_.counted),
                                               .plain_every_steps = options_.steps_per_print});
}

void Reporter::add_files() {
  const RunFolder folder(options_);
  std::optional<std::int64_t> resume_after;
  if (run_.resumed_after > 0) resume_after = run_.resumed_after;
  const auto add = [&](auto make) {
    try {
      metrics_.add(make());
    } catch (const Error& error) {
      log::warn("metrics are not kept: {}", error.what());
    }
  };
  if (options_.csv && folder.has_metrics())
    add([&] {
      observe::CsvFile::Options csv;
      csv.columns = {"loss",          "validation_loss",       "learning_rate",
                     "gradient_norm", rate_name(run_.counted), "seconds"};
      if (tells_share_of_peak()) csv.columns.emplace_back("mfu");
      if (run_.on_gpu) csv.columns.emplace_back("memory_gib");
      if (run_.scales_loss) csv.columns.insert(csv.columns.end(), {"loss_scale", "skipped_steps"});
      if (options_.step_times)
        for (const observe::Metric& time : metrics_of({})) csv.columns.push_back(time.name);
      csv.resume_after = resume_after;
      return std::make_unique<observe::CsvFile>(folder.metrics(), csv);
    });
  if (options_.tensorboard && folder.has_tensorboard())
    add([&] {
      return std::make_unique<observe::TensorBoardFile>(folder.tensorboard(), resume_after);
    });
}

void Reporter::begin_steps() {
  recent_.start(Clock::now());
  whole_.start(Clock::now());
}

void Reporter::step(std::int64_t step, const StepReport& report) {
  const auto now = Clock::now();
  recent_.add(report.count, now);
  whole_.add(report.count, now);
  std::vector<observe::Metric> metrics = {
      {"loss", report.loss},
      {"learning_rate", report.learning_rate},
      {"gradient_norm", report.gradient_norm},
      {rate_name(run_.counted), recent_.per_second()},
      {"seconds", std::chrono::duration<double>(now - start_).count()}};
  std::optional<double> share_of_peak;
  if (tells_share_of_peak()) {
    share_of_peak = recent_.per_second() * options_.flops_per_unit / run_.peak_flops;
    metrics.push_back({"mfu", *share_of_peak});
  }
  if (report.memory_bytes)
    metrics.push_back({"memory_gib", *report.memory_bytes / (1024.0 * 1024 * 1024)});
  if (run_.scales_loss) {
    metrics.push_back({"loss_scale", report.loss_scale});
    metrics.push_back({"skipped_steps", static_cast<double>(report.skipped_steps)});
  }
  if (report.times)
    for (const observe::Metric& time : metrics_of(*report.times)) metrics.push_back(time);
  metrics_.record(step, metrics);
  if (bar_)
    bar_->update({.step = step,
                  .loss = report.loss,
                  .validation_loss = validation_loss_,
                  .rate = recent_.per_second(),
                  .share_of_peak = share_of_peak,
                  .memory_bytes = report.memory_bytes,
                  .seconds_left = std::nullopt});
}

void Reporter::validation(std::int64_t step, double loss,
                          std::span<const observe::Metric> metrics) {
  validation_loss_ = loss;
  std::vector<observe::Metric> all = {{"validation_loss", loss}};
  all.insert(all.end(), metrics.begin(), metrics.end());
  metrics_.record(step, all);
  // The bar has room for the loss only, so the metrics get a line.
  if (metrics.empty() || !bar_) return;
  std::string line = fmt::format("step {}: validation loss {:.4f}", step, loss);
  for (const observe::Metric& metric : metrics)
    line += fmt::format(", {} {:.4f}", metric.name, metric.value);
  bar_->note(line);
}

void Reporter::note(const std::string& text) {
  if (bar_)
    bar_->note(text);
  else
    log::info("{}", text);
}

void Reporter::finish() {
  if (bar_) bar_->finish();
  metrics_.flush();
  if (options_.output.empty() || !options_.csv) return;
  const RunFolder folder(options_);
  try {
    observe::LossCurve curve = observe::read_loss_curve(folder.metrics());
    if (!options_.title.empty()) curve.subtitle = options_.title;
    curve.reference = options_.reference_loss;
    write_durably(folder.curve(), observe::draw_svg(curve));
  } catch (const Error& error) {
    log::warn("the loss curve was not drawn: {}", error.what());
  }
}

double Reporter::mean_rate() const { return whole_.per_second(); }

namespace {

void make_writable(const std::filesystem::path& folder) {
  std::error_code failed;
  std::filesystem::create_directories(folder, failed);
  if (failed)
    throw FileError("cannot make the run's folder '{}': {}", folder.string(), failed.message());
  if (::faccessat(AT_FDCWD, folder.c_str(), W_OK | X_OK, AT_EACCESS) != 0)
    throw FileError("nothing can be written in the run's folder '{}': {}", folder.string(),
                    std::strerror(errno));
}

}  // namespace

FolderHolder this_generation() {
  return {.job = net::job_identity(), .generation = read_launch_environment().generation};
}

std::shared_ptr<const FolderLock> RunFolder::claim() const {
  make_writable(options_.output);
  std::optional<FolderHolder> holder = this_generation();
  if (holder->job.empty()) holder.reset();
  auto lock = std::make_shared<const FolderLock>(options_.output, holder);
  make_writable(checkpoints());
  return lock;
}

void say_end(Speaker& say, const TrainConfig& config, const TrainingResult& result,
             const std::string& note) {
  using End = TrainingResult::End;
  say("{} at step {}: loss {:.4f}{}{}",
      result.end == End::finished  ? "done"
      : result.end == End::stopped ? "stopped"
                                   : "interrupted",
      result.step, result.loss,
      result.validation_loss ? fmt::format(", validation {:.4f}", *result.validation_loss) : "",
      note);
  if (result.skipped_steps > 0)
    say("{} of the steps {} skipped, for a loss or gradient that is not a number or infinite",
        result.skipped_steps, result.skipped_steps == 1 ? "was" : "were");
  if (result.end == End::interrupted && !result.checkpoint.empty())
    say("{}", how_to_go_on(config, result.step));
}

void say_files(Speaker& say, const TrainerOptions& options, const TrainingResult& result) {
  say.file("weights", result.checkpoint);
  if (options.csv) say.file("metrics", RunFolder(options).metrics());
  if (options.csv) say.file("curve", RunFolder(options).curve());
}

TrainingResult said_at_the_end(Speaker& say, TrainingResult result) {
  if (result.end == TrainingResult::End::left)
    say("left off after step {}, to go on with all nodes", result.step);
  if (result.output_error == 0) result.output_error = say.error();
  return result;
}

}  // namespace lockstep::train
