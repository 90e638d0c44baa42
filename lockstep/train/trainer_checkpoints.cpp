// How a trainer saves itself and goes on where it was.
#include <cstring>

#include <ATen/ATen.h>

#include <lockstep/base/durable_file.h>
#include <lockstep/base/log.h>
#include <lockstep/checkpoint/checkpoint.h>
#include <lockstep/checkpoint/folder.h>
#include <lockstep/checkpoint/generators.h>
#include <lockstep/train/main_rank.h>
#include <lockstep/train/resume_check.h>
#include <lockstep/train/run_folder.h>
#include <lockstep/train/trainer.h>

namespace lockstep::train {

namespace {

// Every rank's generators, under "rank3/cpu" and so on; on the main rank only.
checkpoint::GeneratorStates gather_generators(const DistributedManager& dist) {
  checkpoint::GeneratorStates all;
  for (const auto& [name, bytes] : checkpoint::generator_states(dist.device())) {
    const auto size = static_cast<std::int64_t>(bytes.size());
    const at::Tensor mine = at::empty({size}, at::kByte);
    std::memcpy(mine.data_ptr(), bytes.data(), bytes.size());
    at::Tensor every =
        at::empty({dist.world_size() * size}, at::device(dist.device()).dtype(at::kByte));
    dist.world()->all_gather(every, mine.to(dist.device())).wait();
    every = every.cpu();
    for (int rank = 0; rank < dist.world_size(); ++rank) {
      auto& state = all[fmt::format("rank{}/{}", rank, name)];
      state.resize(bytes.size());
      std::memcpy(state.data(), static_cast<const std::byte*>(every.data_ptr()) + rank * size,
                  bytes.size());
    }
  }
  return all;
}

// Gives this rank its own; one that the checkpoint does not have keeps what it was seeded with.
void scatter_generators(const DistributedManager& dist, const checkpoint::GeneratorStates& all) {
  checkpoint::GeneratorStates mine;
  for (const auto& [name, bytes] : checkpoint::generator_states(dist.device())) {
    const auto size = static_cast<std::int64_t>(bytes.size());
    // The main rank sends all of them; a row's last byte says whether it was there.
    at::Tensor rows = at::zeros({dist.world_size(), size + 1}, at::kByte);
    if (dist.is_main())
      for (int rank = 0; rank < dist.world_size(); ++rank) {
        const auto found = all.find(fmt::format("rank{}/{}", rank, name));
        if (found == all.end() || found->second.size() != bytes.size()) continue;
        auto* const row = rows[rank].data_ptr<std::uint8_t>();
        std::memcpy(row, found->second.data(), bytes.size());
        row[size] = 1;
      }
    rows = rows.to(dist.device());
    dist.world()->broadcast(rows, 0).wait();
    rows = rows.cpu();
    const auto* const row = rows[dist.rank()].data_ptr<std::uint8_t>();
    if (row[size] == 0) continue;
    auto& state = mine[name];
    state.resize(bytes.size());
    std::memcpy(state.data(), row, bytes.size());
  }
  if (!mine.empty()) checkpoint::restore_generators(mine, dist.device());
}

// Under all their names, as checkpoints have them; cut ones only say how large they are.
std::vector<NamedTensor> tensors_of(const torch::nn::Module& model) {
  std::vector<NamedTensor> tensors;
  for (const auto& item : model.named_parameters()) tensors.push_back({item.key(), item.value()});
  for (const auto& item : model.named_buffers()) tensors.push_back({item.key(), item.value()});
  return tensors;
}

// The new one is safe: that an old one stays costs nothing but room on the disk.
void remove_old_or_warn(const std::filesystem::path& folder, int keep_last) {
  try {
    checkpoint::remove_old(folder, keep_last);
  } catch (const Error& error) {
    log::warn("an old checkpoint stays where it is: {}", error.what());
  }
}

}  // namespace

checkpoint::TrainingState Trainer::state() const {
  const data::SamplerState data = loader_.state();
  std::map<std::string, double> values;
  if (loss_scaling_) values = loss_scaling_->values();
  values["updates"] = static_cast<double>(updates_);
  return {.step = step_,
          .data = {.epoch = data.epoch, .position = data.position, .size = data.size},
          .seed = data.seed,
          .samples_seen = samples_,
          .last_loss = result_.loss,
          .values = std::move(values),
          .config = options_.config,
          .generators = {}};
}

// What would keep the run from being saved is found before anything is computed.
std::optional<FolderLock> Trainer::open_output() const {
  std::optional<FolderLock> lock;
  if (options_.output.empty()) return lock;
  on_main_rank(dist_, [&] {
    checkpoint::check_contents({.model = tensors_of(*model_),
                                .optimizer = optimizer_->state(),
                                .state = state(),
                                .files = task_->checkpoint_files(),
                                .stored = task_->stored_forms()});
    const RunFolder folder(options_);
    lock.emplace(folder.claim());
    if (!options_.config.empty()) write_durably(folder.config(), options_.config);
    return std::string();
  });
  return lock;
}

void Trainer::resume() {
  const std::string from = on_main_rank(dist_, [&]() -> std::string {
    if (options_.resume_from) return options_.resume_from->string();
    if (options_.output.empty()) return "";
    if (options_.resume == ResumePolicy::never) {
      check_no_later_checkpoints(RunFolder(options_).checkpoints(), 0);
      return "";
    }
    const auto newest = checkpoint::newest_checkpoint(RunFolder(options_).checkpoints());
    return newest ? newest->path.string() : "";
  });
  if (!from.empty()) restore(from);
}

// The main rank reads the files; the others get everything from it.
void Trainer::restore(const std::filesystem::path& from) {
  // What is read goes into tensors that are there: the model's own, or whole ones beside its parts.
  const std::vector<NamedTensor> model = dist_.full_state_dict(model_);
  const std::vector<NamedTensor> optimizer = dist_.full_optimizer_state(model_, *optimizer_);
  checkpoint::TrainingState state;
  const std::string text = on_main_rank(dist_, [&] {
    state = checkpoint::load_checkpoint(from, model, optimizer, task_->stored_forms());
    return checkpoint::to_text({.state = state, .files = {}});
  });
  dist_.load_full_state_dict(model_, model);
  dist_.load_full_optimizer_state(model_, *optimizer_, optimizer);
  scatter_generators(dist_, state.generators);
  state = checkpoint::parse_state(text, from.string()).state;
  step_ = state.step;
  const auto updates = state.values.find("updates");
  if (updates == state.values.end())
    throw UsageError("the checkpoint '{}' does not say how many updates were made: it is not one "
                     "of a training run",
                     from.string());
  if (!(updates->second >= 0) || updates->second > static_cast<double>(step_))
    throw UsageError("the checkpoint '{}' has made {} updates in {} steps: it is damaged",
                     from.string(), updates->second, step_);
  updates_ = static_cast<std::int64_t>(updates->second);
  result_.skipped_steps = step_ - updates_;
  if (loss_scaling_) loss_scaling_->load(state.values);
  samples_ = state.samples_seen;
  result_.checkpoint = from;
  result_.loss = state.last_loss.value_or(0);
  loader_.load_state({.epoch = state.data.epoch,
                      .position = state.data.position,
                      .size = state.data.size,
                      .seed = state.seed});
  leave_finished_epoch();
  count_steps();
  if (finished())
    log::info("all {} steps were done before ({}): more of them need a larger max_steps or epochs",
              step_, from.string());
  else
    log::info("goes on from step {} ({})", step_, from.string());
}

bool Trainer::save(WhenSavingFails when_it_fails) {
  if (options_.output.empty()) return false;
  const auto generators = gather_generators(dist_);
  const std::vector<NamedTensor> model = dist_.full_state_dict(model_);
  const std::vector<NamedTensor> optimizer = dist_.full_optimizer_state(model_, *optimizer_);
  const auto folder = RunFolder(options_).checkpoints();
  const auto write = [&]() -> std::string {
    checkpoint::TrainingState now = state();
    now.generators = generators;
    return checkpoint::save_checkpoint(folder, {.model = model,
                                                .optimizer = optimizer,
                                                .state = std::move(now),
                                                .files = task_->checkpoint_files(),
                                                .stored = task_->stored_forms()})
        .string();
  };
  const std::string path = on_main_rank(dist_, [&]() -> std::string {
    try {
      const std::string written = write();
      remove_old_or_warn(folder, options_.keep_checkpoints);
      return written;
    } catch (const FileError& error) {
      if (when_it_fails == WhenSavingFails::stop)
        throw FileError("the last checkpoint, of step {}, could not be written, so that the run's "
                        "weights are lost{}: {}",
                        step_,
                        result_.checkpoint.empty()
                            ? ""
                            : fmt::format(" since '{}'", result_.checkpoint.string()),
                        error.what());
      log::warn("no checkpoint of step {}: {}. Training goes on", step_, error.what());
      return "";
    }
  });
  if (path.empty()) return false;
  result_.checkpoint = path;
  return true;
}

}  // namespace lockstep::train
