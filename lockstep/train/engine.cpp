#include <lockstep/train/engine.h>

#include <algorithm>
#include <exception>
#include <map>
#include <utility>

#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>
#include <spdlog/fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/log.h>
#include <lockstep/checkpoint/tensors.h>
#include <lockstep/comm/world/join.h>
#include <lockstep/data/data_loader.h>
#include <lockstep/distributed/rank_messages.h>
#include <lockstep/flight/journal.h>
#include <lockstep/launch/rank_side/report.h>
#include <lockstep/recovery/load_together.h>
#include <lockstep/train/config/batch.h>
#include <lockstep/train/eval_mode.h>
#include <lockstep/train/job_config.h>
#include <lockstep/train/main_rank.h>
#include <lockstep/train/model_task.h>
#include <lockstep/train/module_pipeline.h>
#include <lockstep/train/named_checkpoints.h>
#include <lockstep/train/options.h>
#include <lockstep/train/preflight/run_start.h>
#include <lockstep/train/run_report.h>
#include <lockstep/train/stepper.h>
#include <lockstep/train/threads.h>

namespace lockstep::train {

namespace fs = std::filesystem;

namespace {

constexpr const char* kClientStateFile = "client_state.json";

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

class EngineCore::Epoch {
 public:
  enum class For {
    training,
    evaluation
  };  // an evaluation has all samples, in the data set's order

  Epoch(std::shared_ptr<const data::Dataset> of, const DistributedManager& dist,
        const TrainConfig& config, const Batch& batch, For use)
      : dataset(std::move(of)),
        loader(dataset,
               data::DistributedSampler({.size = dataset->size(),
                                         .num_replicas = dist.data_size(),
                                         .rank = dist.data_rank(),
                                         .shuffle = use == For::training,
                                         .seed = static_cast<std::uint64_t>(config.seed)}),
               {.batch_size = batch.micro,
                .num_workers = static_cast<int>(config.data.num_workers),
                .prefetch = static_cast<int>(config.data.prefetch),
                .samples_per_step = batch.global,
                .drop_last = use == For::training && config.dataloader_drop_last,
                .device = dist.device()}) {}

  std::shared_ptr<const data::Dataset> dataset;
  data::DataLoader loader;
};

struct EngineCore::State {
  // Where a step is: in which of its passes, and what this one has.
  class Passes {
   public:
    explicit Passes(std::int64_t of_a_step) : of_a_step_(of_a_step), in_this_step_(of_a_step) {}

    // The loader gives the pass a batch: of this many samples of this rank, and of all.
    void give(std::int64_t samples, std::int64_t samples_of_all) {
      at_ = At::given;
      samples_ = samples;
      samples_of_all_ = samples_of_all;
    }
    // The step has fewer passes, at the end of an epoch.
    void shorten(std::int64_t in_this_step) { in_this_step_ = in_this_step; }
    void note_backward() { at_ = At::backwards; }
    // Ends the pass. Returns whether the step is over.
    bool end() {
      leave();
      if (++done_ < in_this_step_) return false;
      const std::int64_t samples = samples_of_step_;
      *this = Passes(of_a_step_);
      samples_of_step_ = samples;
      return true;
    }
    // Ends a pass beside those of the step, whose gradients stay on the rank until its last.
    void end_without_step() {
      leave();
      has_kept_ = true;
    }
    // Forgets a batch that was given, and on which nothing was done.
    void drop_unused() {
      if (done_ > 0 || at_ != At::given) return;
      at_ = At::none;
      samples_ = kOwn;
      samples_of_all_ = 0;
      in_this_step_ = of_a_step_;
    }
    std::int64_t take_samples() { return std::exchange(samples_of_step_, 0); }

    bool is_between_steps() const { return done_ == 0 && at_ == At::none; }
    // Whether gradients of passes that took no step() wait on the rank.
    bool has_kept() const { return has_kept_; }
    bool is_first() const { return done_ == 0; }
    bool is_last() const { return done_ + 1 >= in_this_step_; }
    bool has_batch() const { return at_ == At::given; }
    bool has_loss() const { return at_ == At::backwards; }
    // Whether the pass's samples are only there so that this rank runs the model.
    bool stands_in() const { return at_ != At::none && samples_ == 0; }
    std::int64_t samples() const { return samples_; }
    std::int64_t in_this_step() const { return in_this_step_; }
    std::int64_t num_done() const { return done_; }

   private:
    enum class At { none, given, backwards };

    void leave() {
      at_ = At::none;
      samples_ = kOwn;
      samples_of_step_ += std::exchange(samples_of_all_, 0);
    }

    std::int64_t of_a_step_;
    std::int64_t in_this_step_;
    std::int64_t done_ = 0;
    bool has_kept_ = false;
    At at_ = At::none;
    std::int64_t samples_ = kOwn;  // of this rank
    std::int64_t samples_of_all_ = 0;
    std::int64_t samples_of_step_ = 0;

    static constexpr std::int64_t kOwn = -1;  // of the program's own
  };

  State(const EngineConfig& of, const std::function<std::shared_ptr<torch::nn::Module>()>& make,
        const std::function<std::vector<pipeline::ModelBlock>()>& list_blocks,
        const InitializeOptions& options)
      : config(of.values()), dist(setup_distributed(distributed_config(config))) {
    at::set_num_threads(num_threads(config.threads_per_rank, dist));
    check_same_config(config, ranks());
    batch = resolve_batch(config, dist.data_size());
    passes = Passes(batch.accumulation);
    model = config.parallel.pipeline > 1
                ? in_stages(make, list_blocks, options)
                : spread_model(
                      dist, config, make,
                      options.sync_batchnorm ? BatchNorms::of_all_ranks : BatchNorms::of_a_rank);
    if (stages != nullptr && config.parallel.tensor > 1)
      say_together(ranks(), [&] {
        stages->check_tied(model);
        return std::string();
      });
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

  RankMessages ranks() const { return RankMessages(dist.world()); }

  // Makes the model and `stages`.
  std::shared_ptr<torch::nn::Module> in_stages(
      const std::function<std::shared_ptr<torch::nn::Module>()>& make,
      const std::function<std::vector<pipeline::ModelBlock>()>& list_blocks,
      const InitializeOptions& options) {
    if (options.sync_batchnorm)
      throw UsageError("sync_batchnorm is set, and parallel.pipeline is {}: batch norms take their "
                       "statistics over the micro-batches of a stage's rank; leave it out, or "
                       "parallel.pipeline at 1",
                       config.parallel.pipeline);
    torch::manual_seed(static_cast<std::uint64_t>(config.seed));
    return dist.build_model(make, [&](const std::shared_ptr<torch::nn::Module>& whole) {
      std::vector<pipeline::ModelBlock> blocks = list_blocks();
      if (blocks.empty())
        throw UsageError("parallel.pipeline is {}, and this '{}' does not say which blocks its "
                         "stages are made of: return a torch::nn::Sequential, give it a member "
                         "pipeline_blocks(), or pass initialize() a function that lists them "
                         "(docs/engine.md)",
                         config.parallel.pipeline, whole->name());
      stages = std::make_unique<ModulePipeline>(
          dist, whole, std::move(blocks),
          ModulePipeline::Options{.parallel = config.parallel,
                                  .num_micro_batches = batch.accumulation,
                                  .autocast = autocast_of(config, dist.device())});
    });
  }

  at::Tensor widened(at::Tensor output) const {
    return config.precision.compute == Precision::fp32 ? output : in_32_bits(output);
  }
  OutputLoss staged(const BatchLoss& loss) const;
  void run_pipeline(const std::vector<MicroBatch>& batches, const BatchLoss& loss);

  void refuse_in_pipeline(const char* what, const char* instead) const {
    if (stages != nullptr)
      throw UsageError("{} was called, and parallel.pipeline is {}, so that each rank has some of "
                       "the model's layers: call {}",
                       what, config.parallel.pipeline, instead);
  }

  void refuse_under_no_sync(const char* what) const {
    if (num_no_sync > 0)
      throw UsageError("{} was called while no_sync() holds, which keeps gradients on each rank: "
                       "let its guard end, and call backward() and step() for one more pass",
                       what);
  }

  // Begins a call that all ranks make between two steps. Gradients that no_sync() keeps on the
  // ranks stay there, but are no part of a checkpoint.
  enum class Kept { may_be, must_not_be };
  void begin_call(const char* what, Kept kept = Kept::may_be) {
    passes.drop_unused();
    if (kept == Kept::must_not_be && passes.has_kept())
      throw UsageError("{}, and gradients of passes under no_sync() wait for their step, which "
                       "would be lost: call backward() and step() without no_sync() first",
                       what);
    if (!passes.is_between_steps())
      throw UsageError(
          "{} within a step, whose passes are not all done: call backward() and step() "
          "for each batch first; {} of {} have been",
          what, passes.num_done(), passes.in_this_step());
    settle();
    throw_failure();
  }

  void backward(nn::LossSum loss) {
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
    stepper->backward(
        std::move(loss), passes.in_this_step(),
        passes.is_last() && !keeps ? Stepper::Exchange::now : Stepper::Exchange::later, counts);
    end_of(&StepTimes::backward);
    if (!keeps) return;
    autocast_used = false;
    passes.end_without_step();
  }

  // Called before anything of a pass: by the loader or, without one, by backward().
  void begin_pass() {
    if (std::exchange(step_has_begun, true)) return;
    report->begin_step();
    if (times && !clock) clock.emplace(dist.device());
  }
  void end_of(double StepTimes::*part) {
    if (clock) clock->add_to(*times.*part);
  }

  void step() {
    refuse_under_no_sync("step()");
    if (!passes.has_loss())
      throw UsageError(
          "step() was called without backward(): call engine.backward(loss) before it, "
          "in each pass");
    autocast_used = false;
    if (passes.end()) update();
  }

  // Ends a step whose passes are done.
  void update() {
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

  fs::path save(const fs::path& folder, const std::string& tag,
                const std::map<std::string, std::string>& client_state) {
    settle();
    throw_failure();
    return checkpoints.save(
        folder, tag,
        {.tensors = stepper->held(),
         .state = training_state(),
         .files = {{kClientStateFile, nlohmann::json(client_state).dump(2) + "\n"}}},
        {.keep = static_cast<int>(config.checkpoint.keep),
         .asynchronous = config.checkpoint.asynchronous,
         .lock = folder == report->checkpoints() ? report->lock() : nullptr});
  }

  fs::path own_checkpoints() const {
    if (!report->has_folder())
      throw UsageError("no folder for checkpoints is named: set output in the config, or give the "
                       "folder");
    return report->checkpoints();
  }

  // The model is in eval mode while one lives. Autocast that is used meanwhile is no backward
  // pass's.
  class Evaluation {
   public:
    explicit Evaluation(State& state) : state_(state), mode_(state.model) {}
    Evaluation(const Evaluation&) = delete;
    Evaluation& operator=(const Evaluation&) = delete;
    ~Evaluation() { state_.autocast_used = false; }

   private:
    State& state_;
    EvalMode mode_;
  };

  // Where the next step begins in the data.
  void note_position() {
    if (epoch == nullptr) return;
    position = epoch->loader.state();
    if (epoch->loader.batches_left() == 0) begin_next_epoch();
  }
  void begin_next_epoch() {
    position = {.epoch = position.epoch + 1, .size = position.size, .seed = position.seed};
  }

  // Takes the result of the last step, once the host has it.
  void settle() {
    keep_failure([&] {
      if (const auto settled = stepper->settle()) note_result(*settled);
    });
  }

  void note_result(const StepResult& step) {
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

  // A failure is thrown by the next call that all ranks make, so that all of them throw it there.
  template <typename Work>
  void keep_failure(const Work& work) {
    try {
      work();
    } catch (const StepFailed& failed) {
      failure = failed.what();
      last = failed.step();
      ++num_skipped;
    }
  }
  void throw_failure() {
    if (!failure) return;
    const std::string why = *std::exchange(failure, std::nullopt);
    stepper->zero_gradients();
    throw TrainingStopped(why);
  }

  checkpoint::TrainingState training_state() const {
    std::map<std::string, double> values = stepper->values();
    put({.global = batch.global, .micro = batch.micro, .num_ranks = dist.data_size()}, values);
    return {.step = num_steps,
            .data = {.epoch = position.epoch, .position = position.position, .size = position.size},
            .seed = static_cast<std::uint64_t>(config.seed),
            .samples_seen = num_samples,
            .last_loss = last_loss,
            .values = std::move(values),
            .config = to_json(config)};
  }

  // The batch of a run that goes on: what it began with, unless the config asks for another now.
  std::optional<BegunBatch> begun_batch_of(const checkpoint::TrainingState& loaded) const {
    try {
      const TrainConfig then =
          parse_config(loaded.config, {.name = "config", .model_of = ModelOf::program});
      if (then.batch == config.batch && then.elasticity == config.elasticity)
        return begun_in(loaded.values);
    } catch (const UsageError&) {
      // It is no engine's.
    }
    return std::nullopt;
  }

  TrainConfig config;
  DistributedManager dist;
  Batch batch;
  std::unique_ptr<ModulePipeline> stages;  // null where each rank has all layers
  std::shared_ptr<torch::nn::Module> model;
  std::optional<Stepper> stepper;
  std::optional<RunReport> report;
  NamedCheckpoints checkpoints{dist};
  int num_no_sync = 0;  // guards that live

  Passes passes{1};
  bool autocasts = autocast_of(config, dist.device()).has_value();
  bool autocast_used = false;       // in this pass
  std::shared_ptr<Epoch> epoch;     // whose batches are being worked on; null without a loader
  std::shared_ptr<Epoch> prepared;  // the same, or the last one, which the next may use again
  data::SamplerState position;      // where the next step begins in the data

  bool step_has_begun = false;     // for the run's report
  std::optional<PartClock> clock;  // within a step whose times are measured
  std::optional<StepTimes> times, unsettled_times;
  std::int64_t own_samples = 0;        // of batches that train_batch() was given, of all ranks
  std::int64_t unsettled_samples = 0;  // of the last step; 0 where nobody knows
  StepResult last;
  double last_loss = 0;
  std::optional<std::string> failure;  // of the last step, not thrown yet
  std::int64_t num_steps = 0;
  std::int64_t num_skipped = 0;
  std::int64_t num_samples = 0;  // that loaders gave
};

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
  const State::Passes& passes = state_->passes;
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

std::shared_ptr<EngineCore::Epoch> EngineCore::begin_epoch(
    std::shared_ptr<const data::Dataset> dataset) {
  State& state = *state_;
  state.begin_call("a loop over a loader begins");
  check_samples(dataset, "train on");
  check_told_the_same({fmt::format("the data set has {} samples", dataset->size())}, state.ranks());
  // The loader of the epoch before goes on: it has said what there was to say.
  std::shared_ptr<Epoch> epoch = std::move(state.prepared);
  if (epoch == nullptr || epoch->dataset != dataset)
    epoch = std::make_shared<Epoch>(std::move(dataset), state.dist, state.config, state.batch,
                                    Epoch::For::training);
  data::DataLoader& loader = epoch->loader;
  if (state.position.position > 0) loader.load_state(state.position);
  // With dataloader_drop_last, what a run with other batches left of an epoch may be no step.
  if (state.position.position > 0 && loader.batches_left() == 0) state.begin_next_epoch();
  if (state.position.position == 0) loader.set_epoch(state.position.epoch);
  check_batch_norms(state.dist, state.model, loader,
                    {.micro = state.batch.micro,
                     .asked_micro = state.config.batch.micro.value_or(state.batch.micro),
                     .global = state.batch.global,
                     .drop_last = state.config.dataloader_drop_last,
                     .name_of_micro = "train_micro_batch_size_per_gpu",
                     .name_of_drop_last = "dataloader_drop_last"});
  state.epoch = state.prepared = epoch;
  return epoch;
}

bool EngineCore::next(Epoch& epoch, EngineBatch& batch) {
  State& state = *state_;
  if (state.epoch.get() != &epoch)
    throw UsageError(
        "this loop over a loader is over: another has begun since, or a checkpoint was "
        "loaded. Begin a new one");
  if (state.passes.has_batch() || state.passes.has_loss())
    throw UsageError("a batch of the loader was left out: call backward() and step() for each, as "
                     "every rank has to take as many steps as the others");
  data::DataLoader& loader = epoch.loader;
  if (loader.batches_left() == 0) {
    // Its last passes may wait for a step of the next epoch's.
    if (state.passes.has_kept()) state.note_position();
    state.epoch.reset();
    state.begin_call("the loop ends");
    return false;
  }
  state.begin_pass();
  if (state.passes.is_first())
    state.passes.shorten(std::min(state.batch.accumulation, loader.batches_left()));
  data::Batch given = loader.next().value();
  state.passes.give(given.size(), given.global_size);
  if (given.size() == 0) given = stand_in(*epoch.dataset, state.batch.micro, state.dist.device());
  batch = {.data = std::move(given.input), .target = std::move(given.target)};
  state.end_of(&StepTimes::data);
  return true;
}

double EngineCore::evaluate(const std::shared_ptr<const data::Dataset>& dataset,
                            const std::function<nn::LossSum(const EngineBatch& batch)>& loss_of) {
  State& state = *state_;
  state.begin_call("evaluate() was called");
  check_samples(dataset, "evaluate");
  check_told_the_same({fmt::format("the data set has {} samples", dataset->size())}, state.ranks());
  const c10::NoGradGuard no_grad;
  const State::Evaluation evaluation(state);
  Epoch all(dataset, state.dist, state.config, state.batch, Epoch::For::evaluation);
  std::vector<double> sums(2);
  while (auto given = all.loader.next()) {
    const bool counts = given->size() > 0;
    if (!counts) *given = stand_in(*dataset, state.batch.micro, state.dist.device());
    const nn::LossSum loss = loss_of({.data = given->input, .target = given->target});
    if (!loss.sum.defined() || loss.sum.numel() != 1)
      throw UsageError("the loss of evaluate() is not one number: take its mean or its sum");
    if (!counts) continue;
    sums[0] += loss.sum.item<double>();
    sums[1] += static_cast<double>(loss.count);
  }
  sums = state.dist.sum_over_data(std::move(sums));
  return sums[0] / sums[1];
}

namespace {

// The ranks of a pipeline must give it the same batches, and all ranks as many: where they do not,
// some would wait for others. UsageError on all ranks. Returns the samples of all ranks.
std::int64_t check_own_batches(DistributedManager& dist, const std::vector<EngineBatch>& batches,
                               std::int64_t wanted) {
  std::string fault, shapes;
  std::int64_t samples = 0;
  if (static_cast<std::int64_t>(batches.size()) != wanted)
    fault = fmt::format("{} batch{} given, and a step has {} passes (gradient_accumulation_steps)",
                        batches.size(), batches.size() == 1 ? " was" : "es were", wanted);
  for (const EngineBatch& batch : batches) {
    const bool has_samples = batch.data.defined() && batch.data.dim() > 0 && batch.data.size(0) > 0;
    if (!has_samples && fault.empty()) fault = "a batch without samples was given";
    if (!has_samples) continue;
    samples += batch.data.size(0);
    shapes += fmt::format(" {} [{}]", c10::toString(batch.data.scalar_type()),
                          fmt::join(batch.data.sizes(), ", "));
  }
  const std::vector<std::string> said =
      RankMessages(dist.world())
          .gather(fault.empty()
                      ? fmt::format("{}:{} samples in{}", dist.data_rank(), samples, shapes)
                      : "!" + fault);
  std::map<std::string, std::pair<std::size_t, std::string>> first;  // by place in the data
  for (std::size_t rank = 0; rank < said.size(); ++rank)
    if (said[rank].starts_with('!')) throw UsageError("rank {}: {}", rank, said[rank].substr(1));
  for (std::size_t rank = 0; rank < said.size(); ++rank) {
    const auto colon = said[rank].find(':');
    const auto& [holder, known] =
        first.try_emplace(said[rank].substr(0, colon), rank, said[rank].substr(colon + 1))
            .first->second;
    if (known != said[rank].substr(colon + 1))
      throw UsageError("ranks {} and {} work on the same samples, and were given other batches: {} "
                       "and {}. Give all ranks of one data_rank() the same",
                       holder, rank, known, said[rank].substr(colon + 1));
  }
  std::int64_t of_all = 0;
  for (const auto& [place, given] : first) of_all += std::stoll(given.second);
  return of_all;
}

}  // namespace

nn::LossSum EngineCore::mean_of(const at::Tensor& loss, std::int64_t samples) {
  return loss_sum(in_32_bits(loss), std::max<std::int64_t>(1, samples), LossReduction::mean);
}

// The loss of a pipeline's last stage.
OutputLoss EngineCore::State::staged(const BatchLoss& loss) const {
  if (!loss.of_output)
    throw UsageError("parallel.pipeline is {}, and the model's forward() does not return a tensor, "
                     "which the loss of a pipeline takes",
                     config.parallel.pipeline);
  return {.of =
              [this, &loss](const at::Tensor& output, const MicroBatch& given) {
                return loss.of_output(widened(output), given.target,
                                      std::max<std::int64_t>(1, given.samples));
              },
          .counts_itself = loss.counts_itself};
}

// Runs the passes of a step, which `passes` knows of already.
void EngineCore::State::run_pipeline(const std::vector<MicroBatch>& batches,
                                     const BatchLoss& loss) {
  // About how much the loss counts, for its scale: of tokens, one for each number of the target.
  std::int64_t expected = 0;
  for (const MicroBatch& one : batches)
    expected += loss.counts_itself && one.samples > 0 && one.target.defined() ? one.target.numel()
                                                                              : one.samples;
  const OutputLoss of_outputs = staged(loss);
  begin_pass();
  stepper->backward_passes(expected, [&](const auto& scale) -> Stepper::PassesLoss {
    const PipelinedLoss made = stages->run(batches, of_outputs, scale);
    return {.sum = made.sum, .count = made.count};
  });
  end_of(&StepTimes::backward);
  update();
}

double EngineCore::train_batch(const std::shared_ptr<const data::Dataset>& dataset,
                               const BatchLoss& loss) {
  State& state = *state_;
  state.refuse_under_no_sync("train_batch()");
  std::shared_ptr<Epoch> epoch = state.epoch;
  // A loop that was left before it used its last batch has taken that one from the loader.
  const bool goes_on = epoch != nullptr && epoch->dataset == dataset &&
                       epoch->loader.batches_left() > 0 && state.passes.is_between_steps();
  if (goes_on)
    state.begin_call("train_batch() was called");
  else
    epoch = begin_epoch(dataset);
  std::vector<MicroBatch> batches;
  for (bool over = false; !over;) {
    EngineBatch batch;
    next(*epoch, batch);
    over = state.passes.is_last();
    if (state.stages == nullptr) {
      at::Tensor output;
      state.backward(loss.of_batch(batch, output));
      state.step();
      continue;
    }
    batches.push_back({.input = std::move(batch.data),
                       .target = std::move(batch.target),
                       .samples = state.passes.samples()});
    state.passes.note_backward();
    state.passes.end();
  }
  if (state.stages != nullptr) state.run_pipeline(batches, loss);
  return last_step().loss;
}

double EngineCore::train_batch(const std::vector<EngineBatch>& batches, const BatchLoss& loss) {
  State& state = *state_;
  state.refuse_under_no_sync("train_batch()");
  state.begin_call("train_batch() was called");
  const std::int64_t samples = check_own_batches(state.dist, batches, state.batch.accumulation);
  state.epoch.reset();  // its batches are not this step's
  state.own_samples = samples;
  state.begin_pass();
  std::vector<MicroBatch> given;
  for (const EngineBatch& batch : batches) {
    if (state.stages == nullptr) {
      at::Tensor output;
      state.backward(loss.of_batch(batch, output));
      state.step();
    } else {
      given.push_back({.input = batch.data, .target = batch.target, .samples = batch.data.size(0)});
    }
  }
  if (state.stages != nullptr) state.run_pipeline(given, loss);
  return last_step().loss;
}

double EngineCore::evaluate(const std::shared_ptr<const data::Dataset>& dataset,
                            const BatchLoss& loss) {
  State& state = *state_;
  if (state.stages == nullptr)
    return evaluate(dataset, [&](const EngineBatch& batch) {
      at::Tensor output;
      return loss.of_batch(batch, output);
    });
  state.begin_call("evaluate() was called");
  check_samples(dataset, "evaluate");
  check_told_the_same({fmt::format("the data set has {} samples", dataset->size())}, state.ranks());
  const State::Evaluation evaluation(state);
  const OutputLoss of_outputs = state.staged(loss);
  Epoch all(dataset, state.dist, state.config, state.batch, Epoch::For::evaluation);
  std::vector<double> sums(2);
  while (all.loader.batches_left() > 0) {
    std::vector<MicroBatch> batches;
    while (static_cast<std::int64_t>(batches.size()) < state.batch.accumulation) {
      auto given = all.loader.next();
      if (!given) break;
      const std::int64_t samples = given->size();
      if (samples == 0) *given = stand_in(*dataset, state.batch.micro, state.dist.device());
      batches.push_back({.input = given->input, .target = given->target, .samples = samples});
    }
    const PipelinedLoss made = state.stages->evaluate(batches, of_outputs);
    sums[0] += made.sum;
    sums[1] += static_cast<double>(made.count);
  }
  sums = state.dist.sum_over_data(std::move(sums));
  return sums[0] / sums[1];
}

EngineEvaluation EngineCore::eval_batch(const EngineBatch& batch, const BatchLoss& loss,
                                        Outputs outputs) {
  State& state = *state_;
  state.begin_call("eval_batch() was called");
  check_own_batches(state.dist, {batch}, 1);
  const c10::NoGradGuard no_grad;
  const State::Evaluation evaluation(state);
  EngineEvaluation made;
  std::vector<double> sums(2);
  if (state.stages == nullptr) {
    const nn::LossSum one = loss.of_batch(batch, made.output);
    sums = {one.sum.item<double>(), static_cast<double>(one.count)};
  } else {
    const PipelinedLoss one = state.stages->evaluate(
        {{.input = batch.data, .target = batch.target, .samples = batch.data.size(0)}},
        state.staged(loss), outputs == Outputs::none ? nullptr : &made.output);
    sums = {one.sum, static_cast<double>(one.count)};
    if (outputs == Outputs::on_all_ranks)
      made.output = state.stages->from_last_stage(std::move(made.output));
    if (made.output.defined()) made.output = state.widened(made.output);
  }
  if (outputs == Outputs::none) made.output = at::Tensor();
  sums = state.dist.sum_over_data(std::move(sums));
  made.loss = sums[0] / sums[1];
  made.count = sums[1];
  return made;
}

fs::path EngineCore::save_checkpoint(const fs::path& folder, const std::string& tag,
                                     const std::map<std::string, std::string>& client_state) {
  State& state = *state_;
  state.begin_call("save_checkpoint() was called", State::Kept::must_not_be);
  check_told_the_same({fmt::format("the checkpoint's tag is \"{}\"", tag)}, state.ranks());
  return state.save(folder.empty() ? state.own_checkpoints() : folder, tag, client_state);
}

void EngineCore::wait_for_checkpoint() {
  state_->begin_call("wait_for_checkpoint() was called");
  state_->checkpoints.finish();
}

std::optional<LoadedCheckpoint> EngineCore::load_checkpoint(const fs::path& from,
                                                            const std::string& tag) {
  State& state = *state_;
  state.begin_call("load_checkpoint() was called", State::Kept::must_not_be);
  state.checkpoints.finish();
  const fs::path folder = from.empty() ? state.own_checkpoints() : from;
  fs::path found = state.checkpoints.find(folder, tag);
  if (found.empty() && from.empty() && state.config.checkpoint.resume == Resume::from)
    found = state.config.checkpoint.resume_from;
  if (found.empty()) {
    if (state.dist.is_main()) log::info("'{}' has no checkpoint to go on from", folder.string());
    return std::nullopt;
  }
  if (from.empty() && state.config.checkpoint.resume == Resume::never)
    throw UsageError("'{}' has checkpoints, and checkpoint.resume is \"never\": choose another "
                     "output, or remove them",
                     folder.string());
  // All that can be wrong besides the tensors is found before these are touched.
  const checkpoint::TrainingState loaded = read_state(state.dist, found);
  const std::string client_state = read_file(state.dist, found, kClientStateFile, "{}");
  const std::string what = fmt::format("the checkpoint '{}'", found.string());
  const auto begun = state.begun_batch_of(loaded);
  const Batch batch = resolve_batch(state.config, state.dist.data_size(), begun);
  Stepper::check(loaded, what);
  if (state.stages != nullptr) state.stages->check_size(batch.accumulation);
  state.stepper->restore(found);
  state.stepper->load(loaded, what);
  state.batch = batch;
  state.passes = State::Passes(batch.accumulation);
  state.num_steps = loaded.step;
  state.num_skipped = loaded.step - state.stepper->updates();
  state.num_samples = loaded.samples_seen;
  state.last_loss = loaded.last_loss.value_or(0);
  state.last = {.number = loaded.step, .loss = state.last_loss};
  state.position = {.epoch = loaded.data.epoch,
                    .position = loaded.data.position,
                    .size = loaded.data.size,
                    .seed = loaded.seed};
  state.epoch.reset();
  state.prepared.reset();
  state.report->go_on_from(loaded.step);
  if (state.dist.is_main()) {
    log::info("goes on from step {} ({})", loaded.step, what);
    if (const std::string note = batch_note(batch, state.dist.data_size(), begun,
                                            state.config.parallel.ranks_together());
        !note.empty())
      log::info("{}", note);
  }
  return LoadedCheckpoint{
      .path = found,
      .global_step = loaded.step,
      .client_state =
          nlohmann::json::parse(client_state).get<std::map<std::string, std::string>>()};
}

void EngineCore::save_model(const fs::path& file) {
  State& state = *state_;
  state.begin_call("save_model() was called");
  const std::vector<NamedTensor> whole = state.dist.full_state_dict(state.model);
  asked_of_main_rank(state.dist, [&] {
    checkpoint::save_tensors(file, whole);
    return std::string();
  });
}

void EngineCore::load_model(const fs::path& file) {
  State& state = *state_;
  state.begin_call("load_model() was called");
  std::vector<NamedTensor> whole;
  asked_of_main_rank(state.dist, [&] {
    whole = checkpoint::load_tensors(file);
    return std::string();
  });
  state.dist.load_full_state_dict(state.model, whole);
}

at::Tensor EngineCore::widened(at::Tensor output) const {
  return state_->widened(std::move(output));
}

}  // namespace lockstep::train
