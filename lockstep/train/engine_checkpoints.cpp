// What an engine has on disk: its checkpoints, the model alone, and the folder of its run.
#include <utility>

#include <nlohmann/json.hpp>

#include <lockstep/base/durable_file.h>
#include <lockstep/base/log.h>
#include <lockstep/checkpoint/tensors.h>
#include <lockstep/train/engine_state.h>
#include <lockstep/train/job_config.h>
#include <lockstep/train/main_rank.h>
#include <lockstep/train/preflight/run_start.h>

namespace lockstep::train {

namespace fs = std::filesystem;

namespace {

constexpr const char* kClientStateFile = "client_state.json";

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

fs::path EngineCore::State::save(const fs::path& folder, const std::string& tag,
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

fs::path EngineCore::State::own_checkpoints() const {
  if (!report->has_folder())
    throw UsageError("no folder for checkpoints is named: set output in the config, or give the "
                     "folder");
  return report->checkpoints();
}

checkpoint::TrainingState EngineCore::State::training_state() const {
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

std::optional<BegunBatch> EngineCore::State::begun_batch_of(
    const checkpoint::TrainingState& loaded) const {
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
  state.passes = EnginePasses(batch.accumulation);
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

}  // namespace lockstep::train
