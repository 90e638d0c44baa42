#include <lockstep/train/options.h>

#include <cmath>
#include <limits>

#include <lockstep/base/error.h>

namespace lockstep::train {

namespace {

void check_least(const char* name, std::int64_t value, std::int64_t least) {
  if (value < least) throw UsageError("{} is {}: it must be at least {}", name, value, least);
}

void check_rate(const char* name, double value) {
  if (!std::isfinite(value) || value < 0)
    throw UsageError("{} is {}: it must be a number from 0 up", name, value);
}

std::string number_or_none(const std::optional<std::int64_t>& number) {
  return number ? std::to_string(*number) : "not given";
}

std::string text_of(const optim::OptimizerOptions& optimizer) {
  std::string text = optim::name_of(optimizer);
  for (const auto& [key, value] : optim::texts_of(optimizer))
    text += fmt::format(", {} {}", key, value);
  return text;
}

const char* text_of(Resume resume) {
  switch (resume) {
    case Resume::automatic: return "automatic";
    case Resume::never: return "never";
    case Resume::from: return "from";
  }
  return "";
}

std::string text_of(const std::optional<optim::LossScaleOptions>& scale) {
  if (!scale) return "not given";
  if (scale->loss_scale != 0) return fmt::format("{}, always", scale->loss_scale);
  return fmt::format("2^{} at first, a window of {}, hysteresis {}{}, at least {}",
                     scale->initial_scale_power, scale->loss_scale_window, scale->hysteresis,
                     scale->consecutive_hysteresis ? " in a row" : "", scale->min_loss_scale);
}

}  // namespace

void check_length(const TrainerOptions& options) {
  if (!options.max_steps && !options.epochs)
    throw UsageError("how long to train is not said: set max_steps, epochs or both");
}

void check(const TrainerOptions& options) {
  check_least("max_steps", options.max_steps.value_or(1), 1);
  check_least("epochs", options.epochs.value_or(1), 1);
  if ((options.resume == Resume::from) == options.resume_from.empty())
    throw UsageError("resume is {} and resume_from '{}': give the checkpoint to start from with "
                     "Resume::from, and none without it",
                     text_of(options.resume), options.resume_from.string());
  check_least("batch_size", options.batch_size, 1);
  check_least("accumulation", options.accumulation, 1);
  check_least("samples_per_step", options.samples_per_step.value_or(1), 1);
  if (options.samples_per_step && options.accumulation != 1)
    throw UsageError("samples_per_step is {} and accumulation {}: leave one of them out, as the "
                     "first is cut into as many passes as it needs",
                     *options.samples_per_step, options.accumulation);
  if (options.samples_per_step && options.learning_rate_scaling != LearningRateScaling::none)
    throw UsageError("samples_per_step is {}, so that a step has the same samples on any number of "
                     "ranks: leave learning_rate_scaling out",
                     *options.samples_per_step);
  check_rate("learning_rate", options.learning_rate);
  check_rate("weight_decay", options.weight_decay);
  check_rate("gradient_clipping", options.gradient_clipping);
  check_least("validation_interval", options.validation_interval, 0);
  check_least("validation_batches", options.validation_batches, 0);
  if (options.validation_batches > std::numeric_limits<std::int64_t>::max() / options.accumulation)
    throw UsageError("validation_batches is {}, with an accumulation of {} more than can be "
                     "counted: 0 takes the whole set",
                     options.validation_batches, options.accumulation);
  check_least("checkpoint_interval", options.checkpoint_interval, 0);
  check_least("keep_checkpoints", options.keep_checkpoints, 0);
  check_least("memory_interval", options.memory_interval, 0);
  if (options.memory_interval > 0 && options.peer_copies == nullptr)
    throw UsageError(
        "memory_interval is {}, and there is nothing that outlives the trainer to keep "
        "copies in: set peer_copies to one that is made outside of keep_going()",
        options.memory_interval);
  check_least("patience", options.patience, 0);
  if (!std::isfinite(options.judge.min_delta) || options.judge.min_delta < 0)
    throw UsageError("judge.min_delta is {}: it must be a number from 0 up",
                     options.judge.min_delta);
  if (!(options.ema_decay >= 0 && options.ema_decay < 1))
    throw UsageError("ema_decay is {}: it must be a number from 0 up and below 1, such as 0.999",
                     options.ema_decay);
  if (options.validation_weights == Weights::averaged && options.ema_decay == 0)
    throw UsageError("validation_weights are averaged ones, and ema_decay is 0, which averages "
                     "none: set it, for example to 0.999");
  if (options.keep_best && options.output.empty())
    throw UsageError(
        "keep_best is set, and there is no folder for the best checkpoint: set output");
  check_least("steps_per_print", options.steps_per_print, 0);
  check_least("progress_fd", options.progress_fd, -1);
  if (options.reference_loss && !std::isfinite(options.reference_loss->value))
    throw UsageError("reference_loss is {}: a line cannot be drawn there",
                     options.reference_loss->value);
}

std::vector<std::string> lines_of(const TrainerOptions& options) {
  const auto flag = [](bool value) { return value ? "on" : "off"; };
  std::vector<std::string> lines{
      fmt::format("seed is {}", options.seed),
      fmt::format("max_steps is {}", number_or_none(options.max_steps)),
      fmt::format("epochs is {}", number_or_none(options.epochs)),
      fmt::format("batch_size is {}", options.batch_size),
      fmt::format("accumulation is {}", options.accumulation),
      fmt::format("samples_per_step is {}", number_or_none(options.samples_per_step)),
      fmt::format("drop_last is {}", flag(options.drop_last)),
      fmt::format("shuffle is {}", flag(options.shuffle)),
      fmt::format("the optimizer is {}", text_of(options.optimizer)),
      fmt::format("learning_rate is {}", options.learning_rate),
      fmt::format("learning_rate_scaling is {}", static_cast<int>(options.learning_rate_scaling)),
      fmt::format("weight_decay is {}", options.weight_decay),
      fmt::format("decay_rule is {}", static_cast<int>(options.decay_rule)),
      fmt::format("gradient_clipping is {}", options.gradient_clipping),
      fmt::format("on_non_finite is {}",
                  options.on_non_finite == NonFinite::stop ? "stop" : "skip"),
      fmt::format("autocast is {}",
                  options.autocast ? c10::toString(*options.autocast) : "not given"),
      fmt::format("loss_scale is {}", text_of(options.loss_scale)),
      fmt::format("validation_interval is {}", options.validation_interval),
      fmt::format("validation_batches is {}", options.validation_batches),
      fmt::format("validation_weights are {}",
                  options.validation_weights == Weights::averaged ? "averaged" : "trained"),
      fmt::format("judge.metric is {}, the {} the better, by more than {}", options.judge.metric,
                  options.judge.better == Judge::Better::larger ? "larger" : "smaller",
                  options.judge.min_delta),
      fmt::format("patience is {}", options.patience),
      fmt::format("keep_best is {}", flag(options.keep_best)),
      fmt::format("ema_decay is {}", options.ema_decay),
      fmt::format("output is {}", options.output.empty() ? "not given" : "given"),
      fmt::format("checkpoint_interval is {}", options.checkpoint_interval),
      fmt::format("asynchronous_checkpoints is {}", flag(options.asynchronous_checkpoints)),
      fmt::format("memory_interval is {}", options.memory_interval),
      fmt::format("resume is {}", text_of(options.resume)),
      fmt::format("resume_from is {}", options.resume_from.empty() ? "not given" : "given")};
  const auto schedule = optim::make_schedule(options.schedule, options.learning_rate);
  for (const std::int64_t step : {0, 1, 10, 100, 1000, 10'000, 100'000})
    lines.push_back(
        fmt::format("the learning rate of step {} is {}", step, schedule->learning_rate(step)));
  return lines;
}

}  // namespace lockstep::train
