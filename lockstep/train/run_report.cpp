#include <lockstep/train/run_report.h>

#include <lockstep/base/durable_file.h>
#include <lockstep/base/log.h>
#include <lockstep/train/job_config.h>
#include <lockstep/train/main_rank.h>

namespace lockstep::train {

namespace {

TrainerOptions reported(const TrainConfig& config, c10::Device device) {
  TrainerOptions options = trainer_options(config, device);
  // The program has the terminal.
  options.progress_fd = -1;
  options.csv = config.csv_monitor.enabled && !config.csv_monitor.output_path.empty();
  options.tensorboard = config.tensorboard.enabled && !config.tensorboard.output_path.empty();
  return options;
}

}  // namespace

RunReport::RunReport(const DistributedManager& dist, const TrainConfig& config, bool scales_loss)
    : dist_(dist), options_(reported(config, dist.device())), scales_loss_(scales_loss) {
  asked_of_main_rank(dist_, [&] {
    if (!has_folder()) return std::string();
    const RunFolder folder(options_);
    lock_ = folder.claim();
    write_durably(folder.config(), options_.config);
    return std::string();
  });
}

RunReport::~RunReport() {
  try {
    flush();
  } catch (const std::exception& error) {
    log::warn("the last metrics may be missing: {}", error.what());
  }
}

bool RunReport::writes() const { return dist_.is_main() && (options_.csv || options_.tensorboard); }

void RunReport::begin_step() {
  if (!writes()) return;
  if (reporter_ == nullptr)
    reporter_ =
        std::make_unique<Reporter>(options_, Reporter::Run{.resumed_after = begun_after_,
                                                           .scales_loss = scales_loss_,
                                                           .on_gpu = dist_.device().is_cuda()});
  reporter_->begin_steps();
}

void RunReport::step(const StepResult& step, double count, std::int64_t num_skipped,
                     const std::optional<StepTimes>& times) {
  if (reporter_ == nullptr) return;
  if (lock_ != nullptr) lock_->check();
  reporter_->step(step.number, {.loss = step.loss,
                                .count = count,
                                .gradient_norm = step.gradient_norm,
                                .learning_rate = step.learning_rate,
                                .loss_scale = step.loss_scale,
                                .skipped_steps = num_skipped,
                                .memory_bytes = peak_memory(dist_.device()),
                                .times = times});
}

void RunReport::go_on_from(std::int64_t step) {
  flush();
  reporter_.reset();
  begun_after_ = step;
}

void RunReport::flush() {
  if (reporter_ != nullptr) reporter_->finish();
}

}  // namespace lockstep::train
