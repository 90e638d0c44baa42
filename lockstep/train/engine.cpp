// How an engine is made, and its steps.
#include <algorithm>
#include <exception>
#include <utility>

#include <ATen/Parallel.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/base/log.h>
#include <lockstep/comm/world/join.h>
#include <lockstep/flight/journal.h>
#include <lockstep/launch/rank_side/report.h>
#include <lockstep/recovery/load_together.h>
#include <lockstep/train/engine_state.h>
#include <lockstep/train/job_config.h>
#include <lockstep/train/model_task.h>
#include <lockstep/train/preflight/run_start.h>

namespace lockstep {

EngineConfig::EngineConfig(train::ConfigDraft draft)
    : values_((draft.finish(), draft.config())), without_effect_(draft.without_effect()) {}

EngineConfig::EngineConfig(const std::filesystem::path& file,
                           const std::vector<std::string>& overrides)
    : EngineConfig(train::read_config(file, overrides, train::NamedFiles::checked,
                                      train::ModelOf::program)) {}

EngineConfig EngineConfig::from_json(std::string_view text) {
  return EngineConfig(train::draft_config(
      text, {.name = "the engine's config", .model_of = train::ModelOf::program}));
}

}  // namespace lockstep

namespace lockstep::train {

namespace {

StepperOptions stepper_options(const TrainConfig& config, c10::Device device) {
  StepperOptions options{.optimizer = config.optimizer.options,
                         .weight_decay = config.optimizer.weight_decay,
                         .schedule = config.scheduler,
                         .learning_rate = config.optimizer.lr,
                         .gradient_clipping = config.gradient_clipping,
                         .on_non_finite = config.on_non_finite_loss,
                         .autocast = autocast_of(config, device),
                         .loss_scale = loss_scale_of(config, device),
                         .seed = static_cast<std::uint64_t>(config.seed)};
  if (config.max_steps) options.schedule.set_length(*config.max_steps);
  return options;
}

at::Tensor in_32_bits(const at::Tensor& tensor) {
  const bool is_short = tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
  return is_short ? tensor.to(at::kFloat) : tensor;
}

}  // namespace

EngineCore::State::State(const EngineConfig& of,
                         const std::function<std::shared_ptr<torch::nn::Module>()>& make,
                         const std::function<std::vector<pipeline::ModelBlock>()>& list_blocks,
                         const InitializeOptions& options)
    : config(of.values()), dist(setup_distributed(distributed_config(config))) {
  at::set_num_threads(num_threads(config.threads_per_rank, dist));
  check_same_config(config, ranks());
  batch = resolve_batch(config, dist.data_size());
  passes = EnginePasses(batch.accumulation);
  if (config.parallel.pipeline == 1) {
    model = spread_model(dist, config, make,
                         options.sync_batchnorm ? BatchNorms::of_all_ranks : BatchNorms::of_a_rank);
  } else {
    if (options.sync_batchnorm)
      throw UsageError("sync_batchnorm is set, and parallel.pipeline is {}: batch norms take their "
                       "statistics over the micro-batches of a stage's rank; leave it out, or "
                       "parallel.pipeline at 1",
                       config.parallel.pipeline);
    torch::manual_seed(static_cast<std::uint64_t>(config.seed));
    stages = build_in_stages(dist, [&] { return model = make(); }, list_blocks,
                             {.parallel = config.parallel,
                              .num_micro_batches = batch.accumulation,
                              .autocast = autocast_of(config, dist.device())});
  }
  stepper.emplace(dist, model, stepper_options(config, dist.device()));
  report.emplace(dist, config, stepper->scales_loss());
  if (config.wall_clock_breakdown) times.emplace();
  if (!dist.is_main()) return;
  if (!of.without_effect().empty())
    log::warn("{} {} no effect on an engine (docs/config.md and docs/engine.md say why)",
              fmt::join(of.without_effect(), ", "),
              of.without_effect().size() == 1 ? "has" : "have");
  if (dist.world_size() > 1) log::info("{}", comm::describe(*dist.world()));
  if (const std::string note =
          batch_note(batch, dist.data_size(), {}, config.parallel.ranks_together());
      !note.empty())
    log::info("{}", note);
}

at::Tensor EngineCore::State::widened(at::Tensor output) const {
  return config.precision.compute == Precision::fp32 ? output : in_32_bits(output);
}

void EngineCore::State::refuse_in_pipeline(const char* what, const char* instead) const {
  if (stages != nullptr)
    throw UsageError("{} was called, and parallel.pipeline is {}, so that each rank has some of "
                     "the model's layers: call {}",
                     what, config.parallel.pipeline, instead);
}

void EngineCore::State::refuse_under_no_sync(const char* what) const {
  if (num_no_sync > 0)
    throw UsageError("{} was called while no_sync() holds, which keeps gradients on each rank: "
                     "let its guard end, and call backward() and step() for one more pass",
                     what);
}

void EngineCore::State::begin_call(const char* what, Kept kept) {
  passes.drop_unused();
  if (kept == Kept::must_not_be && passes.has_kept())
    throw UsageError("{}, and gradients of passes under no_sync() wait for their step, which "
                     "would be lost: call backward() and step() without no_sync() first",
                     what);
  if (!passes.is_between_steps())
    throw UsageError("{} within a step, whose passes are not all done: call backward() and step() "
                     "for each batch first; {} of {} have been",
                     what, passes.num_done(), passes.in_this_step());
  settle();
  throw_failure();
}

template <typename Work>
void EngineCore::State::keep_failure(const Work& work) {
  try {
    work();
  } catch (const StepFailed& failed) {
    failure = failed.what();
    last = failed.step();
    ++num_skipped;
  }
}

void EngineCore::State::throw_failure() {
  if (!failure) return;
  const std::string why = *std::exchange(failure, std::nullopt);
  stepper->zero_gradients();
  throw TrainingStopped(why);
}

void EngineCore::State::settle() {
  keep_failure([&] {
    if (const auto settled = stepper->settle()) note_result(*settled);
  });
}

void EngineCore::State::note_result(const StepResult& step) {
  using Skipped = StepResult::Skipped;
  last = step;
  if (step.skipped != Skipped::nothing_to_learn) last_loss = step.loss;
  if (step.skipped != Skipped::no) ++num_skipped;
  // A loop without a loader says only what its loss counts.
  const double samples =
      unsettled_samples > 0 ? static_cast<double>(unsettled_samples) : step.count;
  report->step(step, samples, num_skipped, unsettled_times);
  if (!dist.is_main()) return;
  if (step.skipped != Skipped::no) log::warn("{}", describe_skipped(step, stepper->loss_scale()));
  if (step.number % config.steps_per_print == 0)
    log::info("step {}: loss {:.4f}, gradient norm {:.3f}, learning rate {:g}", step.number,
              step.loss, step.gradient_norm, step.learning_rate);
}

void EngineCore::State::begin_pass() {
  if (std::exchange(step_has_begun, true)) return;
  report->begin_step();
  if (times && !clock) clock.emplace(dist.device());
}

void EngineCore::State::backward(nn::LossSum loss) {
  throw_failure();
  if (passes.has_loss())
    throw UsageError("backward() was called twice in one pass: add the losses and call it once, "
                     "or call step() after each");
  if (autocasts && !autocast_used)
    throw UsageError("the config trains in 16 bits, and this loss was computed in 32: call "
                     "engine.forward(…), or hold engine.autocast() while the model runs");
  const bool counts = !passes.stands_in();
  begin_pass();
  end_of(&StepTimes::forward);
  passes.note_backward();
  const bool keeps = num_no_sync > 0;
  stepper->backward(std::move(loss), passes.in_this_step(),
                    passes.is_last() && !keeps ? Stepper::Exchange::now : Stepper::Exchange::later,
                    counts);
  end_of(&StepTimes::backward);
  if (!keeps) return;
  autocast_used = false;
  passes.end_without_step();
}

void EngineCore::State::step() {
  refuse_under_no_sync("step()");
  if (!passes.has_loss())
    throw UsageError("step() was called without backward(): call engine.backward(loss) before it, "
                     "in each pass");
  autocast_used = false;
  if (passes.end()) update();
}

void EngineCore::State::update() {
  const std::int64_t samples = passes.take_samples();
  num_samples += samples;
  settle();
  throw_failure();
  const auto number = static_cast<std::uint64_t>(num_steps + 1);
  dist.world()->journal().note_progress(number, "update");
  report_progress(number);
  keep_failure([&] { stepper->update(num_steps + 1); });
  stepper->zero_gradients();
  ++num_steps;
  note_position();
  end_of(&StepTimes::update);
  step_has_begun = false;
  clock.reset();
  if (times) unsettled_times = std::exchange(*times, {});
  unsettled_samples = samples + std::exchange(own_samples, 0);
  if (!stepper->runs_ahead()) settle();
  throw_failure();
  checkpoints.poll();
  const std::int64_t interval = config.checkpoint.interval;
  if (interval > 0 && num_steps % interval == 0) save(report->checkpoints(), "", {});
}

void EngineCore::State::note_position() {
  if (epoch == nullptr) return;
  position = epoch->loader.state();
  if (epoch->loader.batches_left() == 0) begin_next_epoch();
}

void EngineCore::State::begin_next_epoch() {
  position = {.epoch = position.epoch + 1, .size = position.size, .seed = position.seed};
}

EngineCore::EngineCore(const EngineConfig& config,
                       const std::function<std::shared_ptr<torch::nn::Module>()>& make,
                       const std::function<std::vector<pipeline::ModelBlock>()>& list_blocks,
                       const InitializeOptions& options)
    : state_(std::make_unique<State>(config, make, list_blocks, options)) {}

// A checkpoint that is still being written is finished, unless an error ends the program.
EngineCore::~EngineCore() {
  if (std::uncaught_exceptions() > 0) return;
  try {
    state_->checkpoints.finish();
  } catch (const std::exception& error) {
    log::error("{}", error.what());
  }
}

DistributedManager& EngineCore::dist() { return state_->dist; }

EngineNoSync EngineCore::no_sync() {
  State& state = *state_;
  state.refuse_in_pipeline("no_sync()", "engine.train_batch(batches, loss_of), which exchanges "
                                        "gradients once a step");
  if (!state.passes.is_first() || state.passes.has_loss())
    throw UsageError(
        "no_sync() was called within a step, of which {} of {} passes are done: call it "
        "between steps, before their first pass",
        state.passes.num_done(), state.passes.in_this_step());
  ++state.num_no_sync;
  return EngineNoSync(shared_from_this(), state.dist.no_sync(state.model));
}

EngineNoSync::~EngineNoSync() {
  if (core_ != nullptr) core_->end_no_sync();
}

void EngineCore::end_no_sync() { --state_->num_no_sync; }

std::optional<device::Autocast> EngineCore::autocast() {
  state_->refuse_in_pipeline("engine.forward() or autocast()",
                             "engine.train_batch(batches, loss_of), eval_batch() or "
                             "evaluate(dataset, loss_of) with a loss_of(output, target)");
  state_->autocast_used = true;
  return state_->stepper->low_precision();
}

void EngineCore::backward(const at::Tensor& loss) {
  state_->refuse_in_pipeline("backward()", "engine.train_batch(batches, loss_of)");
  const EnginePasses& passes = state_->passes;
  if (!passes.has_batch() && !passes.has_loss())
    throw UsageError("backward(loss) weighs a mean by the samples of the loader's batch, and there "
                     "is none: take batches from engine.loader(dataset), or call "
                     "backward(loss_sum, count)");
  const std::int64_t size = std::max<std::int64_t>(1, passes.samples());
  state_->backward(loss_sum(in_32_bits(loss), size, LossReduction::mean));
}

void EngineCore::backward(const at::Tensor& sum, std::int64_t count) {
  state_->refuse_in_pipeline("backward()", "engine.train_batch(batches, loss_of)");
  state_->backward({.sum = sum, .count = count});
}

void EngineCore::step() { state_->step(); }
bool EngineCore::at_boundary() const { return state_->passes.is_last(); }
std::int64_t EngineCore::num_passes() const { return state_->batch.accumulation; }
std::int64_t EngineCore::micro_batch() const { return state_->batch.micro; }
std::int64_t EngineCore::global_batch() const { return state_->batch.global; }

double EngineCore::learning_rate() const {
  state_->settle();
  return state_->stepper->learning_rate();
}

double EngineCore::loss_scale() const { return state_->stepper->loss_scale(); }

EngineStep EngineCore::last_step() {
  state_->settle();
  const StepResult& last = state_->last;
  return {.loss = last.loss,
          .count = last.count,
          .gradient_norm = last.gradient_norm,
          .was_skipped = last.skipped != StepResult::Skipped::no};
}

std::int64_t EngineCore::num_steps() const { return state_->num_steps; }

std::int64_t EngineCore::num_skipped() {
  state_->settle();
  return state_->num_skipped;
}

std::int64_t EngineCore::num_samples() const { return state_->num_samples; }
std::int64_t EngineCore::epoch() const { return state_->position.epoch; }

nn::LossSum EngineCore::mean_of(const at::Tensor& loss, std::int64_t samples) {
  return loss_sum(in_32_bits(loss), std::max<std::int64_t>(1, samples), LossReduction::mean);
}

at::Tensor EngineCore::widened(at::Tensor output) const {
  return state_->widened(std::move(output));
}

}  // namespace lockstep::train
