#include <lockstep/train/trainer.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <csignal>
#include <utility>

#include <ATen/ATen.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/base/log.h>
#include <lockstep/device/cuda.h>
#include <lockstep/device/device_manager.h>
#include <lockstep/distributed/config_rules.h>
#include <lockstep/distributed/rank_messages.h>
#include <lockstep/flight/journal.h>
#include <lockstep/launch/rank_side/report.h>
#include <lockstep/recovery/keep_going.h>
#include <lockstep/train/preflight/run_plan.h>
#include <lockstep/train/preflight/run_start.h>
#include <lockstep/train/stop_request.h>

namespace lockstep::train {

namespace {

double scaled_learning_rate(const TrainerOptions& options, int num_ranks) {
  switch (options.learning_rate_scaling) {
    case LearningRateScaling::linear: return options.learning_rate * num_ranks;
    case LearningRateScaling::square_root: return options.learning_rate * std::sqrt(num_ranks);
    case LearningRateScaling::none: break;
  }
  return options.learning_rate;
}

// Returns the signal that interrupted any rank, the same on all ranks; 0 if there was none.
int signal_of(const DistributedManager& dist) {
  constexpr std::array kSignals = {SIGINT, SIGTERM, SIGHUP};
  std::vector<double> heard;
  for (const int signal : kSignals) heard.push_back(StopRequest::latest_signal() == signal ? 1 : 0);
  heard = dist.sum(std::move(heard));
  for (std::size_t i = 0; i < kSignals.size(); ++i)
    if (heard[i] > 0) return kSignals[i];
  return 0;
}

// UsageError if validations are to be judged, and cannot be.
void check_judge(const TrainerOptions& options, bool validates,
                 const std::vector<std::string>& metrics) {
  if (options.patience == 0 && !options.keep_best) return;
  if (!validates)
    throw UsageError("{} is set, and there is no validation set to judge the weights by: give "
                     "fit() one",
                     options.patience > 0 ? "patience" : "keep_best");
  const std::string& metric = options.judge.metric;
  if (metric == "validation_loss" || std::ranges::count(metrics, metric) > 0) return;
  throw UsageError("judge.metric is \"{}\", and validations have validation_loss{}{}", metric,
                   metrics.empty() ? "" : ", ", fmt::join(metrics, ", "));
}

// fp16 always has a loss scale, even if none was asked for.
std::optional<optim::LossScaleOptions> loss_scale_of(const TrainerOptions& options,
                                                     const DistributedConfig& config) {
  if (options.loss_scale) return options.loss_scale;
  const bool half = options.autocast == at::kHalf ||
                    config.fsdp.mixed_precision.param_dtype == at::kHalf ||
                    config.fsdp.mixed_precision.reduce_dtype == at::kHalf;
  return half ? std::optional(optim::LossScaleOptions{}) : std::nullopt;
}

}  // namespace

Trainer::Trainer(DistributedManager dist, std::shared_ptr<Task> task, TrainerOptions options,
                 std::shared_ptr<const Callbacks> callbacks)
    : dist_(std::move(dist)),
      task_(std::move(task)),
      model_(task_->model()),
      options_((check(options), std::move(options))),
      callbacks_(std::move(callbacks)),
      batch_(asked_batch(options_, dist_.data_size())) {
  check_told_the_same(lines_of(options_), rank_messages());
  check_autocast();
}

Trainer::~Trainer() = default;

// Gives the run its data. If it has begun in other data, it goes on at the same place.
void Trainer::begin(const Dataset& training, const Dataset& validation) {
  check_samples(training, "train on");
  if (training != training_ || loader_ == nullptr) {
    std::optional<data::SamplerState> place = std::exchange(position_, std::nullopt);
    if (!place && loader_ != nullptr) {
      place = loader_->state();
      if (place->position == 0) place->size = training->size();
    }
    loader_ = load_data(training, Samples::in_training_order);
    training_ = training;
    if (place) place_in_data(*place);
  }
  if (validation != nullptr) check_samples(validation, "validate on");
  check_told_the_same({fmt::format("the training set has {} samples", training_->size()),
                       fmt::format("the validation set has {} samples",
                                   validation == nullptr ? 0 : validation->size())},
                      rank_messages());
  check_batch_norms();
  make_stepper();
  count_steps();
}

void Trainer::make_stepper() {
  if (stepper_ != nullptr) return;
  if (!dist_.is_wrapped(model_)) dist_.wrap_model(model_);
  stepper_ = std::make_unique<Stepper>(
      dist_, model_,
      StepperOptions{.optimizer = options_.optimizer,
                     .weight_decay = options_.weight_decay,
                     .decay_rule = options_.decay_rule,
                     .schedule = options_.schedule,
                     .learning_rate = scaled_learning_rate(options_, dist_.data_size()),
                     .gradient_clipping = options_.gradient_clipping,
                     .on_non_finite = options_.on_non_finite,
                     .autocast = options_.autocast,
                     .loss_scale = loss_scale_of(options_, dist_.config()),
                     .ema_decay = options_.ema_decay,
                     .seed = options_.seed});
}

// Forgets the run, but for the weights.
void Trainer::begin_anew() {
  if (!is_over_) return;
  is_over_ = false;
  reporter_.reset();
  stepper_.reset();
  loader_.reset();
  position_.reset();
  unsettled_times_.reset();
  unreported_.reset();
  batch_ = asked_batch(options_, dist_.data_size());
  step_ = samples_ = saved_step_ = not_better_ = epoch_steps_ = 0;
  epoch_loss_ = epoch_count_ = 0;
  result_ = {};
}

Batch asked_batch(const TrainerOptions& options, std::int64_t num_ranks) {
  if (options.samples_per_step)
    return divide_batch(*options.samples_per_step, num_ranks, options.batch_size);
  constexpr std::int64_t kMost = std::int64_t{1} << 53;
  if (options.batch_size > kMost / num_ranks ||
      options.accumulation > kMost / num_ranks / options.batch_size)
    throw UsageError("a step of {} batches of {} samples on {} ranks has more samples than can be "
                     "counted: make accumulation or batch_size smaller",
                     options.accumulation, options.batch_size, num_ranks);
  return {.micro = options.batch_size,
          .accumulation = options.accumulation,
          .global = options.batch_size * options.accumulation * num_ranks};
}

// Keeps the batch of the run that goes on, whatever number of ranks it had, unless another batch
// was asked for.
void Trainer::keep_batch(const std::map<std::string, double>& values) {
  const auto begun = begun_in(values);
  if (!begun || begun->global == batch_.global) return;
  if (options_.samples_per_step ||
      begun->of_a_rank != options_.batch_size * options_.accumulation) {
    log::info("a step has {} samples, and had {}", batch_.global, begun->global);
    return;
  }
  batch_ = divide_batch(begun->global, dist_.data_size(), options_.batch_size);
  if (const PipelinePasses* const pipeline = task_->pipeline())
    pipeline->check_passes(batch_.accumulation);
  if (loader_ != nullptr) {
    loader_->set_step(batch_.micro, batch_.global);
    check_batch_norms();
  }
  // The learning rate belongs to this batch, too.
  stepper_->set_learning_rate(scaled_learning_rate(options_, begun->global / begun->of_a_rank));
  log::info("{}",
            batch_note(batch_, dist_.data_size(), begun, dist_.world_size() / dist_.data_size()));
}

void Trainer::check_autocast() const {
  if (!options_.autocast) return;
  if (takes_units(dist_.config()))
    throw UsageError("autocast is set, and this job's strategy cuts gradients among ranks: set "
                     "DistributedConfig::fsdp.mixed_precision.param_dtype instead");
  // Throws before the first step if LibTorch has no autocast for this device.
  const device::Autocast once(dist_.device().type(), *options_.autocast);
}

void Trainer::check_batch_norms() const {
  train::check_batch_norms(dist_, model_, *loader_,
                           {.micro = batch_.micro,
                            .asked_micro = options_.batch_size,
                            .global = batch_.global,
                            .drop_last = options_.drop_last,
                            .name_of_micro = "batch_size",
                            .name_of_drop_last = "drop_last"});
}

bool Trainer::finished() const {
  return (options_.max_steps && step_ >= *options_.max_steps) ||
         (options_.epochs && loader_ != nullptr && loader_->state().epoch >= *options_.epochs);
}

void Trainer::count_steps() {
  if (loader_ == nullptr || (!options_.max_steps && !options_.epochs)) return;
  total_steps_ = RunLength{.max_steps = options_.max_steps, .epochs = options_.epochs}.total_steps(
      loader_->num_steps(),
      {.steps_done = step_, .epoch = loader_->state().epoch, .steps_left = loader_->steps_left()});
}

// With drop_last, the rest of an epoch that a run with other batches left may be less than a step.
void Trainer::leave_finished_epoch() {
  if (loader_->batches_left() == 0) loader_->set_epoch(loader_->state().epoch + 1);
}

TrainingResult Trainer::fit(Dataset training, Dataset validation) {
  check_length(options_);
  begin_anew();
  begin(training, validation);
  check_judge(options_, validation != nullptr, task_->metric_names());
  is_over_ = true;
  wants_stop_ = false;
  result_.end = TrainingResult::End::finished;
  const StopRequest stop;
  // However fit() is left, the folder is free for other runs afterwards.
  const std::shared_ptr<void> gives_up_the_folder(nullptr, [this](void*) {
    reporter_.reset();
    checkpoints_.reset();
    lock_.reset();
  });
  open_output();
  resume();
  // A run that was over before has everything in its files already.
  if (dist_.is_main() && !finished())
    reporter_ =
        std::make_unique<Reporter>(options_, Reporter::Run{.total_steps = total_steps_,
                                                           .resumed_after = step_,
                                                           .counted = task_->counted(),
                                                           .scales_loss = stepper_->scales_loss(),
                                                           .on_gpu = dist_.device().is_cuda(),
                                                           .peak_flops = peak_flops()});
  result_.resumed_after = step_;
  run_loop(validation, stop);
  if (reporter_) {
    check_still_ours();
    reporter_->finish();
    result_.output_error = reporter_->output_error();
    result_.units_per_second = reporter_->mean_rate();
  }
  finish_save();
  if (step_ > saved_step_) save(Saving::at_the_end);
  if (result_.end == TrainingResult::End::interrupted) {
    result_.signal = signal_of(dist_);
    if (result_.signal == 0) result_.end = TrainingResult::End::left;
  }
  leave_copies();
  result_.step = step_;
  return result_;
}

void Trainer::run_loop(const Dataset& validation, const StopRequest& stop) {
  using End = TrainingResult::End;
  if (dist_.world_size() > 1) speeds_.emplace(dist_);
  // State that is only in memory is saved before training goes on.
  if (step_ > saved_step_ && agree({.leave = stop.made()}).leave && !finished())
    result_.end = End::interrupted;
  // A run that early stopping ended has no more to do.
  if (options_.patience > 0 && not_better_ >= options_.patience) result_.end = End::stopped;
  while (!finished() && result_.end == End::finished) {
    if (reporter_ && stepper_->is_settled()) reporter_->begin_steps();
    const std::int64_t epoch = loader_->state().epoch;
    take_step();
    report_settled();
    const bool epoch_over = loader_->state().epoch > epoch;
    if (epoch_over && !callbacks_->on_epoch.empty()) end_epoch();
    if (!finished() &&
        (options_.validation_interval > 0 ? due(options_.validation_interval) : epoch_over))
      validate(validation);
    const Wishes wishes = agree({.leave = stop.made() || asked_to_leave(), .stop = wants_stop_});
    if (!finished() && wishes.leave) result_.end = End::interrupted;
    if (!finished() && wishes.stop && !wishes.leave) result_.end = End::stopped;
    const bool last = finished() || result_.end != End::finished;
    poll_save();
    if (!last && due(options_.checkpoint_interval)) save(Saving::on_the_way);
    if (!last && due(options_.memory_interval)) take_copy();
  }
  finish_step();
  if (result_.end == End::finished) validate(validation);
}

EpochEnd Trainer::train_epoch(Dataset training) {
  begin(training, nullptr);
  is_over_ = wants_stop_ = false;
  epoch_loss_ = epoch_count_ = 0;
  epoch_steps_ = 0;
  if (dist_.world_size() > 1) speeds_.emplace(dist_);
  const std::int64_t epoch = loader_->state().epoch;
  while (loader_->state().epoch == epoch) {
    take_step();
    report_settled();
    if (!callbacks_->on_step.empty() && agree({.stop = wants_stop_}).stop) break;
  }
  return end_epoch();
}

EpochEnd Trainer::end_epoch() {
  finish_step();
  const EpochEnd end{.epoch = loader_->state().epoch,
                     .step = step_,
                     .loss = unsigned_nan(epoch_loss_ / epoch_count_),
                     .steps = epoch_steps_};
  epoch_loss_ = epoch_count_ = 0;
  epoch_steps_ = 0;
  call(callbacks_->on_epoch, end);
  return end;
}

// One step, and whether this rank is slow.
void Trainer::take_step() {
  if (speeds_) speeds_->begin_step();
  try {
    train_step();
  } catch (const CommError&) {
    throw;
  } catch (const std::exception&) {
    // The step before may have caused this error; if it did, finish_step() throws the better
    // message.
    try {
      finish_step();
    } catch (const TrainingStopped&) {
      throw;
    } catch (const std::exception& error) {
      log::debug("what the step before came to is not known: {}", error.what());
    }
    throw;
  }
  if (speeds_)
    for (const std::string& news : speeds_->end_step(step_)) log::warn("{}", news);
}

template <typename Calls, typename Event>
void Trainer::call(const Calls& callbacks, const Event& event) {
  for (const auto& callback : callbacks)
    if (callback(event) == Then::stop) wants_stop_ = true;
}

// The peak of all ranks' devices together, which are of one kind; 0 if it is not known.
double Trainer::peak_flops() const {
  if (!dist_.device().is_cuda()) return 0;
  const auto& shards = dist_.config().fsdp.mixed_precision;
  const c10::ScalarType type = options_.autocast ? *options_.autocast
                               : takes_units(dist_.config())
                                   ? shards.param_dtype.value_or(at::kFloat)
                                   : at::kFloat;
  return device::peak_flops(dist_.device_manager().name(), type).value_or(0) * dist_.world_size();
}

// Notes the progress for the report of a job that hangs, and for the launcher, which ends a job
// that is stuck.
void Trainer::note_progress(const char* phase, std::int64_t step) const {
  const auto number = static_cast<std::uint64_t>(step);
  dist_.world()->journal().note_progress(number, phase);
  report_progress(number);
}

void Trainer::report_settled() {
  if (!unreported_) return;
  const auto [step, times] = std::move(*unreported_);
  unreported_.reset();
  if (reporter_) {
    check_still_ours();
    if (step.skipped != StepResult::Skipped::no)
      reporter_->note(describe_skipped(step, stepper_->loss_scale()));
    reporter_->step(step.number, {.loss = step.loss,
                                  .count = step.count,
                                  .gradient_norm = step.gradient_norm,
                                  .learning_rate = step.learning_rate,
                                  .loss_scale = step.loss_scale,
                                  .skipped_steps = result_.skipped_steps,
                                  .memory_bytes = peak_memory(dist_.device()),
                                  .times = times});
  }
  call(callbacks_->on_step, StepEnd{.step = step.number,
                                    .loss = step.loss,
                                    .gradient_norm = step.gradient_norm,
                                    .learning_rate = step.learning_rate,
                                    .was_skipped = step.skipped != StepResult::Skipped::no});
}

void Trainer::train_step() {
  model_->train();
  stepper_->zero_gradients();
  std::optional<StepTimes> times;
  if (options_.step_times) times.emplace();
  note_progress("forward and backward");
  run_passes(times);
  leave_finished_epoch();
  // The schedule counts updates, so it has to be known whether the step before was skipped.
  settle();
  std::optional<PartClock> clock;
  if (times) clock.emplace(dist_.device());
  note_progress("update");
  or_give_up([&] { stepper_->update(step_ + 1); });
  if (clock) clock->add_to(times->update);
  ++step_;
  unsettled_times_ = times;
  if (!runs_ahead()) settle();
}

// Takes the result of the last step, once the host has it.
void Trainer::settle() {
  if (stepper_->is_settled()) return;
  if (runs_ahead()) note_progress("the GPU's part", step_);
  or_give_up([&] {
    const StepResult step = stepper_->settle().value();
    if (step.skipped != StepResult::Skipped::no) ++result_.skipped_steps;
    if (step.skipped != StepResult::Skipped::nothing_to_learn) result_.loss = step.loss;
    if (step.skipped == StepResult::Skipped::no) {
      epoch_loss_ += step.loss * step.count;
      epoch_count_ += step.count;
    }
    ++epoch_steps_;
    unreported_ = {.result = step, .times = unsettled_times_};
  });
}

void Trainer::finish_step() {
  settle();
  report_settled();
}

// After a step that failed, everything is written that there is, and the run ends.
template <typename Work>
void Trainer::or_give_up(const Work& work) {
  try {
    work();
  } catch (const StepFailed& failure) {
    if (reporter_) reporter_->finish();
    finish_save();
    throw TrainingStopped(failure.with(
        result_.checkpoint.empty()
            ? "No checkpoint was written before it"
            : fmt::format("The last checkpoint is '{}'", result_.checkpoint.string())));
  }
}

// Runs forward and backward of the step's accumulated batches.
void Trainer::run_passes(std::optional<StepTimes>& times) {
  const std::int64_t global_batch = loader_->sampler().global_batch_size(batch_.micro);
  const std::int64_t num_passes = std::min(batch_.accumulation, loader_->batches_left());
  LOCKSTEP_CHECK(num_passes > 0, "epoch {} is over", loader_->state().epoch);
  std::optional<PartClock> clock;
  if (times) clock.emplace(dist_.device());
  const auto end_of = [&](double StepTimes::*part) {
    if (clock) clock->add_to(*times.*part);
  };
  if (PipelinePasses* pipeline = task_->pipeline()) {
    run_pipeline(*pipeline, num_passes);
    end_of(&StepTimes::backward);
    return;
  }
  for (std::int64_t pass = 0; pass < num_passes; ++pass) {
    data::Batch batch = loader_->next().value();
    samples_ += batch.global_size;
    end_of(&StepTimes::data);
    nn::LossSum loss;
    const bool stands_in = take_stand_in(batch, *training_);
    if (batch.size() > 0) {
      for (std::int64_t& row : batch.rows) row += pass * global_batch;
      task_->begin(step_, batch.rows);
      const auto cast = stepper_->low_precision();
      loss = task_->loss(batch);
    }
    end_of(&StepTimes::forward);
    stepper_->backward(std::move(loss), num_passes,
                       pass + 1 < num_passes ? Stepper::Exchange::later : Stepper::Exchange::now,
                       !stands_in);
    end_of(&StepTimes::backward);
  }
}

// Runs all batches at once: the schedule says when each stage works on which of them.
void Trainer::run_pipeline(PipelinePasses& pipeline, std::int64_t num_passes) {
  const std::int64_t global_batch = loader_->sampler().global_batch_size(batch_.micro);
  std::vector<data::Batch> batches;
  std::int64_t expected = 0;
  for (std::int64_t pass = 0; pass < num_passes; ++pass) {
    data::Batch& batch = batches.emplace_back(loader_->next().value());
    samples_ += batch.global_size;
    if (batch.size() == 0 && !pipeline.takes_empty_batches()) {
      batch = stand_in(*training_, batch_.micro, dist_.device());
      batch.rows.clear();
    }
    for (std::int64_t& row : batch.rows) row += pass * global_batch;
    expected += pipeline.expected_count(batch);
  }
  stepper_->backward_passes(expected,
                            [&](const auto& scale) { return pipeline.run(step_, batches, scale); });
}

Trainer::Wishes Trainer::agree(Wishes wanted) const {
  const std::vector<double> sums =
      dist_.sum(std::vector<double>{wanted.leave ? 1.0 : 0.0, wanted.stop ? 1.0 : 0.0});
  return {.leave = sums[0] > 0, .stop = sums[1] > 0};
}

}  // namespace lockstep::train
