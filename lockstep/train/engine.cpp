#include <lockstep/train/engine.h>

#include <algorithm>
#include <map>
#include <utility>

#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>
#include <spdlog/fmt/ranges.h>
#include <torch/utils.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/durable_file.h>
#include <lockstep/base/file.h>
#include <lockstep/base/log.h>
#include <lockstep/checkpoint/format/folder.h>
#include <lockstep/checkpoint/format/reader.h>
#include <lockstep/checkpoint/tensors.h>
#include <lockstep/comm/world/join.h>
#include <lockstep/data/data_loader.h>
#include <lockstep/distributed/rank_messages.h>
#include <lockstep/flight/journal.h>
#include <lockstep/launch/rank_side/report.h>
#include <lockstep/recovery/checkpointer.h>
#include <lockstep/recovery/load_together.h>
#include <lockstep/train/config/batch.h>
#include <lockstep/train/job_config.h>
#include <lockstep/train/model_task.h>
#include <lockstep/train/module_pipeline.h>
#include <lockstep/train/options.h>
#include <lockstep/train/preflight/run_start.h>
#include <lockstep/train/stepper.h>
#include <lockstep/train/threads.h>

namespace lockstep {

namespace fs = std::filesystem;

EngineConfig::EngineConfig(train::ConfigDraft draft)
    : values_((draft.finish(), draft.config())), without_effect_(draft.without_effect()) {}

EngineConfig::EngineConfig(const fs::path& file, const std::vector<std::string>& overrides)
    : EngineConfig(train::read_config(file, overrides, train::NamedFiles::checked,
                                      train::ModelOf::program)) {}

EngineConfig EngineConfig::from_json(std::string_view text) {
  return EngineConfig(train::draft_config(
      text, {.name = "the engine's config", .model_of = train::ModelOf::program}));
}

}  // namespace lockstep

namespace lockstep::train {

namespace {

constexpr const char* kClientStateFile = "client_state.json";
// Names what was saved last in a folder: a checkpoint or, as DeepSpeed's does, a tag.
constexpr const char* kLatestFile = "latest";

std::shared_ptr<torch::nn::Module> spread(
    DistributedManager& dist, const TrainConfig& config,
    const std::function<std::shared_ptr<torch::nn::Module>()>& make,
    const InitializeOptions& options) {
  torch::manual_seed(static_cast<std::uint64_t>(config.seed));
  if (!options.sync_batchnorm) return dist.build_model(make);
  const std::shared_ptr<torch::nn::Module> model = make();
  if (options.sync_batchnorm) dist.convert_sync_batchnorm(model);
  return dist.wrap_model(model);
}

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

void check_tag(const std::string& tag) {
  const bool names_a_folder =
      std::ranges::none_of(tag, [](unsigned char c) { return c == '/' || c < ' ' || c == 0x7f; });
  if (!names_a_folder || tag.starts_with('.') || tag == kLatestFile || tag.starts_with("step-") ||
      tag.starts_with("damaged-"))
    throw UsageError("\"{}\" cannot be a checkpoint's tag: it must be the name of a folder, and "
                     "none that checkpoints without a tag have",
                     tag);
}

// Such as "\"bad\", \"good\"".
std::string tags_in(const fs::path& folder) {
  std::vector<std::string> tags;
  std::error_code unreadable;
  for (const auto& entry : fs::directory_iterator(folder, unreadable))
    if (entry.is_directory() && checkpoint::newest_checkpoint(entry.path()))
      tags.push_back(fmt::format("\"{}\"", entry.path().filename().string()));
  std::ranges::sort(tags);
  return fmt::format("{}", fmt::join(tags, ", "));
}

// The checkpoint that was saved last in a folder; empty where it has none.
fs::path last_saved(const fs::path& folder) {
  if (!is_there(folder / kLatestFile)) {
    const auto newest = checkpoint::newest_checkpoint(folder);
    const std::string tags = tags_in(folder);
    if (newest || !tags.empty())
      throw UsageError("'{}' has checkpoints ({}), and its file '{}', which names the one that was "
                       "saved last, is gone: name a tag, or write the file anew",
                       folder.string(), newest ? newest->path.filename().string() : tags,
                       kLatestFile);
    return {};
  }
  const MappedFile file(folder / kLatestFile);
  std::string name(reinterpret_cast<const char*>(file.bytes().data()), file.size());
  while (!name.empty() && name.back() == '\n') name.pop_back();
  if (name.starts_with("step-") && name.find('/') == name.npos) return folder / name;
  check_tag(name);
  return last_saved(folder / name);
}

// Samples for a rank that has none, and must run the model. Two, as batch norms want.
data::Batch stand_in(const data::Dataset& dataset, c10::Device device) {
  std::vector<std::int64_t> first = {0};
  if (dataset.size() > 1) first.push_back(1);
  data::Batch batch = dataset.batch(first);
  batch.input = batch.input.to(device);
  if (batch.target.defined()) batch.target = batch.target.to(device);
  return batch;
}

void check_samples(const std::shared_ptr<const data::Dataset>& dataset, const char* what) {
  if (dataset == nullptr || dataset->size() == 0)
    throw UsageError("there are no samples to {}: the data set is {}", what,
                     dataset == nullptr ? "a null pointer" : "empty");
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
      at_ = At::none;
      samples_ = kOwn;
      samples_of_step_ += std::exchange(samples_of_all_, 0);
      if (++done_ < in_this_step_) return false;
      const std::int64_t samples = samples_of_step_;
      *this = Passes(of_a_step_);
      samples_of_step_ = samples;
      return true;
    }
    // Forgets a batch that was given, and on which nothing was done.
    void drop_unused() {
      if (done_ == 0 && at_ == At::given) *this = Passes(of_a_step_);
    }
    std::int64_t take_samples() { return std::exchange(samples_of_step_, 0); }

    bool is_between_steps() const { return done_ == 0 && at_ == At::none; }
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

    std::int64_t of_a_step_;
    std::int64_t in_this_step_;
    std::int64_t done_ = 0;
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
    model = config.parallel.pipeline > 1 ? in_stages(make, list_blocks, options)
                                         : spread(dist, config, make, options);
    if (stages != nullptr && config.parallel.tensor > 1)
      say_together(ranks(), [&] {
        stages->check_tied(model);
        return std::string();
      });
    stepper.emplace(dist, model, stepper_options(config, dist.device()));
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

  // What the main rank finds, on every rank. Where it throws, all throw a UsageError.
  std::string on_main(const std::function<std::string()>& work) const {
    return say_together(ranks(), [&] { return dist.is_main() ? work() : std::string(); }).front();
  }

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

  // Begins a call that all ranks make between two steps.
  void begin_call(const char* what) {
    passes.drop_unused();
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
    passes.note_backward();
    stepper->backward(std::move(loss), passes.in_this_step(),
                      passes.is_last() ? Stepper::Exchange::now : Stepper::Exchange::later, counts);
  }

  void step() {
    if (!passes.has_loss())
      throw UsageError(
          "step() was called without backward(): call engine.backward(loss) before it, "
          "in each pass");
    autocast_used = false;
    if (passes.end()) update();
  }

  // Ends a step whose passes are done.
  void update() {
    num_samples += passes.take_samples();
    settle();
    throw_failure();
    const auto number = static_cast<std::uint64_t>(num_steps + 1);
    dist.world()->journal().note_progress(number, "update");
    report_progress(number);
    keep_failure([&] { stepper->update(num_steps + 1); });
    stepper->zero_gradients();
    ++num_steps;
    note_position();
    if (!stepper->runs_ahead()) settle();
    throw_failure();
  }

  // The model is in eval mode for as long as the result lives. A part that the program has put
  // there stays there.
  std::shared_ptr<void> eval_mode() {
    std::vector<bool> was_training;
    for (const auto& module : model->modules()) was_training.push_back(module->is_training());
    model->eval();
    return {nullptr, [this, was_training](void*) {
              const auto modules = model->modules();
              for (std::size_t i = 0; i < modules.size(); ++i) modules[i]->train(was_training[i]);
              autocast_used = false;
            }};
  }

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

  Passes passes{1};
  bool autocasts = autocast_of(config, dist.device()).has_value();
  bool autocast_used = false;       // in this pass
  std::shared_ptr<Epoch> epoch;     // whose batches are being worked on; null without a loader
  std::shared_ptr<Epoch> prepared;  // the same, or the last one, which the next may use again
  data::SamplerState position;      // where the next step begins in the data

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

EngineCore::~EngineCore() = default;

DistributedManager& EngineCore::dist() { return state_->dist; }

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
    state.epoch.reset();
    state.begin_call("the loop ends");
    return false;
  }
  if (state.passes.is_first())
    state.passes.shorten(std::min(state.batch.accumulation, loader.batches_left()));
  data::Batch given = loader.next().value();
  state.passes.give(given.size(), given.global_size);
  if (given.size() == 0) given = stand_in(*epoch.dataset, state.dist.device());
  batch = {.data = std::move(given.input), .target = std::move(given.target)};
  return true;
}

double EngineCore::evaluate(const std::shared_ptr<const data::Dataset>& dataset,
                            const std::function<nn::LossSum(const EngineBatch& batch)>& loss_of) {
  State& state = *state_;
  state.begin_call("evaluate() was called");
  check_samples(dataset, "evaluate");
  check_told_the_same({fmt::format("the data set has {} samples", dataset->size())}, state.ranks());
  const c10::NoGradGuard no_grad;
  const auto in_eval_mode = state.eval_mode();
  Epoch all(dataset, state.dist, state.config, state.batch, Epoch::For::evaluation);
  std::vector<double> sums(2);
  while (auto given = all.loader.next()) {
    const bool counts = given->size() > 0;
    if (!counts) *given = stand_in(*dataset, state.dist.device());
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
// some would wait for others. UsageError on all ranks.
void check_own_batches(DistributedManager& dist, const std::vector<EngineBatch>& batches,
                       std::int64_t wanted) {
  std::string fault, shapes;
  if (static_cast<std::int64_t>(batches.size()) != wanted)
    fault = fmt::format("{} batch{} given, and a step has {} passes (gradient_accumulation_steps)",
                        batches.size(), batches.size() == 1 ? " was" : "es were", wanted);
  for (const EngineBatch& batch : batches) {
    const bool has_samples = batch.data.defined() && batch.data.dim() > 0 && batch.data.size(0) > 0;
    if (!has_samples && fault.empty()) fault = "a batch without samples was given";
    if (has_samples)
      shapes += fmt::format(" {} [{}]", c10::toString(batch.data.scalar_type()),
                            fmt::join(batch.data.sizes(), ", "));
  }
  const std::vector<std::string> said =
      RankMessages(dist.world())
          .gather(fault.empty() ? fmt::format("{}:{}", dist.data_rank(), shapes) : "!" + fault);
  std::map<std::string, std::pair<std::size_t, std::string>> first;  // by place in the data
  for (std::size_t rank = 0; rank < said.size(); ++rank)
    if (said[rank].starts_with('!')) throw UsageError("rank {}: {}", rank, said[rank].substr(1));
  for (std::size_t rank = 0; rank < said.size(); ++rank) {
    const auto colon = said[rank].find(':');
    const auto& [holder, known] =
        first.try_emplace(said[rank].substr(0, colon), rank, said[rank].substr(colon + 1))
            .first->second;
    if (known != said[rank].substr(colon + 1))
      throw UsageError("ranks {} and {} work on the same samples, and were given other batches:{} "
                       "and{}. Give all ranks of one data_rank() the same",
                       holder, rank, known, said[rank].substr(colon + 1));
  }
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
  std::int64_t samples = 0;
  for (const MicroBatch& one : batches) samples += one.samples;
  const OutputLoss of_outputs = staged(loss);
  stepper->backward_passes(samples, [&](const auto& scale) -> Stepper::PassesLoss {
    const PipelinedLoss made = stages->run(batches, of_outputs, scale);
    return {.sum = made.sum, .count = made.count};
  });
  update();
}

double EngineCore::train_batch(const std::shared_ptr<const data::Dataset>& dataset,
                               const BatchLoss& loss) {
  State& state = *state_;
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
  state.begin_call("train_batch() was called");
  check_own_batches(state.dist, batches, state.batch.accumulation);
  state.epoch.reset();  // its batches are not this step's
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
  const auto in_eval_mode = state.eval_mode();
  const OutputLoss of_outputs = state.staged(loss);
  Epoch all(dataset, state.dist, state.config, state.batch, Epoch::For::evaluation);
  std::vector<double> sums(2);
  while (all.loader.batches_left() > 0) {
    std::vector<MicroBatch> batches;
    while (static_cast<std::int64_t>(batches.size()) < state.batch.accumulation) {
      auto given = all.loader.next();
      if (!given) break;
      const std::int64_t samples = given->size();
      if (samples == 0) *given = stand_in(*dataset, state.dist.device());
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
  const auto in_eval_mode = state.eval_mode();
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
  state.begin_call("save_checkpoint() was called");
  check_tag(tag);
  check_told_the_same({fmt::format("the checkpoint's tag is \"{}\"", tag)}, state.ranks());
  const fs::path of_tag = tag.empty() ? folder : folder / tag;
  const SaveResult saved =
      Checkpointer(state.dist, of_tag)
          .save_and_wait(
              {.tensors = state.stepper->held(),
               .state = state.training_state(),
               .files = {{kClientStateFile, nlohmann::json(client_state).dump(2) + "\n"}}});
  if (!saved.ok())
    throw UsageError("the checkpoint of step {} could not be written: {}", saved.step, saved.error);
  state.on_main([&] {
    write_durably(of_tag / kLatestFile, saved.path.filename().string() + "\n");
    if (tag.empty()) return std::string();
    write_durably(folder / kLatestFile, tag + "\n");
    // A tag has one checkpoint.
    for (const checkpoint::Checkpoint& one : checkpoint::list_checkpoints(of_tag))
      if (one.path.filename() != saved.path.filename()) fs::remove_all(one.path);
    return std::string();
  });
  return saved.path;
}

std::optional<LoadedCheckpoint> EngineCore::load_checkpoint(const fs::path& folder,
                                                            const std::string& tag) {
  State& state = *state_;
  state.begin_call("load_checkpoint() was called");
  check_tag(tag);
  const fs::path found = state.on_main([&]() -> std::string {
    if (!tag.empty() && !is_there(folder / tag)) {
      const std::string tags = tags_in(folder);
      throw UsageError("'{}' has no checkpoint with the tag \"{}\": it has {}", folder.string(),
                       tag, tags.empty() ? "none with a tag" : tags);
    }
    return last_saved(tag.empty() ? folder : folder / tag).string();
  });
  if (found.empty()) {
    if (state.dist.is_main()) log::info("'{}' has no checkpoint to go on from", folder.string());
    return std::nullopt;
  }
  // All that can be wrong besides the tensors is found before these are touched.
  const auto loaded = checkpoint::parse_state(state.on_main([&] {
    checkpoint::CheckpointReader reader(found);
    return checkpoint::to_text(reader.manifest().state);
  }),
                                              "the checkpoint's state");
  const std::string client_state = state.on_main([&] {
    checkpoint::CheckpointReader reader(found);
    return reader.manifest().files.contains(kClientStateFile)
               ? reader.read_text_file(kClientStateFile)
               : std::string("{}");
  });
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
  state.on_main([&] {
    checkpoint::save_tensors(file, whole);
    return std::string();
  });
}

void EngineCore::load_model(const fs::path& file) {
  State& state = *state_;
  state.begin_call("load_model() was called");
  std::vector<NamedTensor> whole;
  state.on_main([&] {
    whole = checkpoint::load_tensors(file);
    return std::string();
  });
  state.dist.load_full_state_dict(state.model, whole);
}

at::Tensor EngineCore::widened(at::Tensor output) const {
  return state_->widened(std::move(output));
}

}  // namespace lockstep::train
