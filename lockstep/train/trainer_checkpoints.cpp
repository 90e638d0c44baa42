// How a trainer saves its state and goes on from a saved one.
#include <algorithm>
#include <sstream>

#include <lockstep/base/durable_file.h>
#include <lockstep/base/log.h>
#include <lockstep/checkpoint/format/folder.h>
#include <lockstep/checkpoint/format/manifest.h>
#include <lockstep/train/main_rank.h>
#include <lockstep/train/preflight/resume_check.h>
#include <lockstep/train/preflight/run_start.h>
#include <lockstep/train/reporter.h>
#include <lockstep/train/trainer.h>

namespace lockstep::train {

namespace {

// The names of numbers in a checkpoint.
constexpr const char* kBest = "best";
constexpr const char* kBestStep = "best.step";
constexpr const char* kNotBetter = "best.validations_since";

Beginning beginning_of(const TrainerOptions& options) {
  return {.resume = options.resume, .from = options.resume_from};
}

}  // namespace

checkpoint::TrainingState Trainer::state() const {
  const data::SamplerState data = loader_ != nullptr ? loader_->state()
                                  : position_        ? *position_
                                                     : data::SamplerState{.seed = options_.seed};
  std::map<std::string, double> values = stepper_->values();
  put({.global = batch_.global,
       .micro = options_.batch_size,
       .num_ranks = dist_.data_size(),
       .of_a_rank = options_.samples_per_step ? 0 : options_.batch_size * options_.accumulation},
      values);
  if (result_.best) {
    values[kBest] = *result_.best;
    values[kBestStep] = static_cast<double>(result_.best_step);
    values[kNotBetter] = static_cast<double>(not_better_);
  }
  return {.step = step_,
          .data = {.epoch = data.epoch, .position = data.position, .size = data.size},
          .seed = data.seed,
          .samples_seen = samples_,
          .last_loss = result_.loss,
          .values = std::move(values),
          .config = options_.config};
}

CheckpointContents Trainer::contents() {
  return {.tensors = stepper_->held(), .state = state(), .files = task_->checkpoint_files()};
}

// Finds the reasons for which the run could not be saved before anything is computed.
void Trainer::open_output() {
  if (options_.output.empty()) return;
  check_contents(contents());
  const RunFolder folder(options_);
  on_main_rank(dist_, [&] {
    lock_ = folder.claim();
    if (!options_.config.empty()) write_durably(folder.config(), options_.config);
    return std::string();
  });
  checkpoints_ = std::make_unique<Checkpointer>(
      dist_, folder.checkpoints(),
      CheckpointerOptions{.keep_last = options_.keep_checkpoints,
                          .lock = lock_,
                          .committed = [output = options_.output, lock = lock_](std::int64_t step) {
                            note_saved(output, step, *lock);
                          }});
  if (options_.keep_best) result_.best_checkpoint = NamedCheckpoints(dist_).find(folder.best(), "");
}

// Only one generation at a time may write metrics or checkpoints.
void Trainer::check_still_ours() const {
  if (lock_ != nullptr) lock_->check();
}

// Leaves the run's start in its folder, for later generations of this job, which may come before
// the first checkpoint.
void Trainer::note_start() {
  if (options_.output.empty()) return;
  on_main_rank(dist_, [&] {
    check_still_ours();
    write_start(options_.output, this_generation(), state());
    return std::string();
  });
}

// The main rank looks in the run's folder whether an earlier generation of this job has begun the
// run.
void Trainer::resume() {
  const std::string begun = on_main_rank(dist_, [&]() -> std::string {
    if (options_.output.empty()) return "";
    const auto start = begun_before(options_.output, this_generation());
    return start ? checkpoint::to_text(*start) : "";
  });
  if (begun.empty()) {
    restore_newest(std::nullopt);
    return note_start();
  }
  const auto start = checkpoint::parse_state(begun, "the run's start");
  keep_batch(start.values);
  restore_newest(start);
}

// Restores the newest state that is whole, on the disk or in the ranks' memory. Copies in memory
// belong to this very run, and so does any checkpoint that is newer than them.
void Trainer::restore_newest(const std::optional<checkpoint::TrainingState>& start) {
  std::optional<std::int64_t> in_memory;
  if (options_.memory_interval > 0) in_memory = options_.peer_copies->newest_step(rank_messages());
  const auto folder = RunFolder(options_).checkpoints();
  const Beginning told = start || !in_memory ? beginning_of(options_) : Beginning{};
  std::istringstream newest_first(on_main_rank(dist_, [&] {
    std::string lines;
    if (options_.output.empty()) return lines;
    for (const checkpoint::Checkpoint& one : to_go_on_from(options_.output, told, start))
      lines = fmt::format("{} {}\n{}", one.step, one.path.string(), lines);
    return lines;
  }));
  std::vector<Damaged> damaged;  // newest first
  checkpoint::Checkpoint next;
  for (std::string path; newest_first >> next.step && std::getline(newest_first.ignore(), path);) {
    next.path = path;
    try {
      if (in_memory >= next.step) {
        restore_copy(next);
      } else {
        restore(next.path);
        warn_of_gone();
        if (in_memory) options_.peer_copies->forget();
      }
      return set_aside(damaged);
    } catch (const checkpoint::DamagedCheckpoint& error) {
      damaged.push_back({next, error.what()});
    }
  }
  if (in_memory) {
    restore_copy({});
    return set_aside(damaged);
  }
  // If no checkpoint can be restored, the damaged ones keep their names, so that the same command
  // finds them again.
  if (!damaged.empty() && options_.resume != Resume::from)
    throw TrainingStopped(fmt::format("{}, and there is no older one that is whole: nothing to go "
                                      "on from. Put a copy of one into "
                                      "'{}', or train in a new folder",
                                      damaged.front().damage, folder.string()));
  on_main_rank(dist_, [&] {
    if (!options_.output.empty()) check_nothing_lost(options_.output, told, start);
    return std::string();
  });
  if (options_.resume != Resume::from) return;
  restore(options_.resume_from);
  warn_of_gone();
  set_aside(damaged);
}

// Steps are trained again, as after damage, and the user is told. Once the run has saved again,
// that checkpoint is the newest.
void Trainer::warn_of_gone() const {
  if (!dist_.is_main() || options_.output.empty()) return;
  try {
    if (const auto gone = newest_is_gone(options_.output); gone && *gone > step_)
      log::warn("a checkpoint of step {} was saved in '{}' and is gone: removed, or on a disk that "
                "is not mounted. The run goes on from step {}",
                *gone, RunFolder(options_).checkpoints().string(), step_);
  } catch (const UsageError& error) {
    log::warn("whether a newer checkpoint is gone is not known: {}", error.what());
  }
}

// Called when another checkpoint has been restored: the damaged ones would otherwise be the newest
// again, and count among those that are kept.
void Trainer::set_aside(const std::vector<Damaged>& all) const {
  if (all.empty()) return;
  on_main_rank(dist_, [&] {
    for (const auto& [checkpoint, damage] : all) {
      try {
        log::warn("{}. It is '{}' now, and the one before is used", damage,
                  checkpoint::set_aside(checkpoint).string());
      } catch (const FileError& error) {
        log::warn("{}. The one before is used ({})", damage, error.what());
      }
    }
    return std::string();
  });
}

// Each rank reads the parts that it needs.
void Trainer::restore(const std::filesystem::path& from) {
  const checkpoint::TrainingState state = stepper_->restore(from);
  go_on_from(state, fmt::format("the checkpoint '{}'", from.string()));
  result_.checkpoint = from;
  saved_step_ = step_;
}

// Restores the copies that ranks keep of each other's state. `on_disk` is the newest checkpoint.
void Trainer::restore_copy(const checkpoint::Checkpoint& on_disk) {
  const std::vector<mesh::HeldTensor> beside = stepper_->beside_model();
  const auto state = options_.peer_copies->restore(dist_, model_, stepper_->optimizer(), beside);
  LOCKSTEP_CHECK(state.has_value(), "a copy that was there is gone");
  stepper_->restored(beside, *state);
  go_on_from(*state, "copies in the ranks' memory");
  result_.checkpoint = on_disk.path;
  saved_step_ = on_disk.step;
  // Only one copy is left of the state of lost ranks: a new copy protects against the next loss.
  take_copy();
}

void Trainer::go_on_from(const checkpoint::TrainingState& state, const std::string& what) {
  step_ = state.step;
  stepper_->load(state, what);
  result_.skipped_steps = step_ - stepper_->updates();
  samples_ = state.samples_seen;
  keep_batch(state.values);
  result_.loss = state.last_loss.value_or(0);
  if (const auto best = state.values.find(kBest); best != state.values.end()) {
    result_.best = best->second;
    result_.best_step = static_cast<std::int64_t>(state.values.at(kBestStep));
    not_better_ = static_cast<std::int64_t>(state.values.at(kNotBetter));
  }
  place_in_data({.epoch = state.data.epoch,
                 .position = state.data.position,
                 .size = state.data.size,
                 .seed = state.seed});
  count_steps();
  if (finished())
    log::info("all {} steps were done before ({}): more of them need a larger max_steps or epochs",
              step_, what);
  else
    log::info("goes on from step {} ({})", step_, what);
}

// The data may not have been given yet.
void Trainer::place_in_data(const data::SamplerState& position) {
  position_ = position;
  if (loader_ == nullptr) return;
  position_.reset();
  loader_->load_state(position);
  leave_finished_epoch();
}

void Trainer::take_copy() {
  finish_step();
  note_progress("copy in another rank's memory");
  options_.peer_copies->take(rank_messages(), contents());
}

// Drops the copies if the run is over or another process may go on with it; if nodes have come,
// leaves new ones for the next generation.
void Trainer::leave_copies() {
  if (options_.memory_interval == 0) return;
  if (result_.end != TrainingResult::End::left) return options_.peer_copies->forget();
  take_copy();
  options_.peer_copies->finish();
}

void Trainer::save(Saving saving) {
  if (checkpoints_ == nullptr) return;
  finish_step();
  note_progress("checkpoint");
  finish_save();
  if (saving == Saving::on_the_way && options_.asynchronous_checkpoints)
    return checkpoints_->save(contents());
  const SaveResult saved = checkpoints_->save_and_wait(contents());
  if (saving == Saving::at_the_end && !saved.ok()) {
    on_main_rank(dist_, [&] {
      check_still_ours();
      return std::string();
    });
    throw TrainingStopped(fmt::format(
        "the last checkpoint, of step {}, could not be written, so that the run's "
        "weights are lost{}: {}",
        step_,
        result_.checkpoint.empty() ? "" : fmt::format(" since '{}'", result_.checkpoint.string()),
        saved.error));
  }
  heed(saved);
}

// Training goes on without it.
void Trainer::save_best() {
  if (checkpoints_ == nullptr) return;
  note_progress("checkpoint");
  try {
    result_.best_checkpoint = NamedCheckpoints(dist_).save(RunFolder(options_).best(), "",
                                                           contents(), {.keep = 1, .lock = lock_});
  } catch (const UsageError& error) {
    if (dist_.is_main()) log::warn("the best weights were not saved: {}", error.what());
  }
}

void Trainer::save_checkpoint(const std::filesystem::path& folder) {
  make_stepper();
  finish_step();
  NamedCheckpoints(dist_).save(folder, "", contents(), {.keep = 1});
}

void Trainer::load_checkpoint(const std::filesystem::path& folder) {
  begin_anew();
  make_stepper();
  finish_step();
  const std::filesystem::path found = NamedCheckpoints(dist_).find(folder, "");
  if (found.empty()) throw UsageError("'{}' has no checkpoint", folder.string());
  const std::string what = fmt::format("the checkpoint '{}'", found.string());
  Stepper::check(read_state(dist_, found), what);
  go_on_from(stepper_->restore(found), what);
}

void Trainer::poll_save() {
  if (checkpoints_ == nullptr) return;
  if (const auto saved = checkpoints_->poll()) heed(*saved);
}

void Trainer::finish_save() {
  if (checkpoints_ != nullptr && checkpoints_->under_way()) heed(checkpoints_->finish());
}

void Trainer::heed(const SaveResult& saved) {
  if (!saved.ok()) {
    if (dist_.is_main())
      log::warn("no checkpoint of step {}: {}. Training goes on", saved.step, saved.error);
    return;
  }
  result_.checkpoint = saved.path;
  saved_step_ = saved.step;
}

}  // namespace lockstep::train
