#include <lockstep/train/train_own_model.h>

#include <ATen/Parallel.h>

#include <lockstep/base/text.h>
#include <lockstep/comm/world/join.h>
#include <lockstep/device/device_manager.h>
#include <lockstep/distributed/rank_messages.h>
#include <lockstep/recovery/load_together.h>
#include <lockstep/train/job_config.h>
#include <lockstep/train/model_library.h>
#include <lockstep/train/preflight/run_plan.h>
#include <lockstep/train/speaker.h>
#include <lockstep/train/stop_request.h>
#include <lockstep/train/trainer.h>

namespace lockstep::train {

namespace {

std::int64_t num_weights(torch::nn::Module& model) {
  std::int64_t sum = 0;
  for (const at::Tensor& weight : model.parameters()) sum += weight.numel();
  return sum;
}

}  // namespace

TrainingResult train_own_model(const TrainConfig& config, int output_fd,
                               std::shared_ptr<PeerCopies> peer_copies) {
  const ModelSection& section = config.model;
  DistributedManager dist = setup_distributed(distributed_config(config));
  // As in train_language_model().
  const StopRequest stop;
  at::set_num_threads(num_threads(config.threads_per_rank, dist));
  Speaker say(dist, output_fd);
  const RankMessages ranks(dist.world());
  check_same_config(config, ranks);
  // A host may have an older library, or none.
  const ModelOptions given(section.options);
  std::unique_ptr<OwnModel> own;
  do_together(ranks, [&] { own = load_own_model(section.library, section.name)(given); });
  const auto model = spread_model(
      dist, config, [&] { return own->make_model(); }, BatchNorms::of_a_rank);
  const auto task = own->task();
  const auto training = own->training_set();
  const auto validation = own->validation_set();
  do_together(ranks, [&] {
    given.check_all_known(section.name);
    if (training == nullptr || training->size() == 0)
      throw UsageError("the training set of {} has no samples", section.name);
  });

  const auto begun = begun_batch_of_job(config, dist);
  const Batch batch = resolve_batch(config, dist.data_size(), begun);
  TrainerOptions options = trainer_options(config, dist.device());
  options.batch_size = batch.micro;
  options.samples_per_step = batch.global;
  const data::StepCut cut{.samples_per_step = batch.global,
                          .samples_per_batch = batch.micro * dist.data_size(),
                          .drop_last = config.dataloader_drop_last};
  const std::int64_t steps_per_epoch = cut.num_steps(cut.num_used(training->size()));
  if (steps_per_epoch == 0)
    throw UsageError("the training set of {} has {} samples, less than one step of {}: make "
                     "train_batch_size smaller, or leave out dataloader_drop_last",
                     section.name, training->size(), batch.global);
  const std::int64_t total_steps =
      RunLength{.max_steps = config.max_steps, .epochs = config.epochs}.total_steps(
          steps_per_epoch);
  options.schedule.set_length(total_steps);
  options.peer_copies = std::move(peer_copies);
  options.progress_fd = output_fd;
  options.title = fmt::format(
      "{} of {}, {} parameters, {} rank{} on {}", section.name, section.library.filename().string(),
      count_text(static_cast<double>(num_weights(*model))), dist.world_size(),
      dist.world_size() == 1 ? "" : "s", dist.device_manager().name());
  say("{}, {} thread{} each", options.title, at::get_num_threads(),
      at::get_num_threads() == 1 ? "" : "s");
  say("{} samples to train on, {} to validate; {} steps of {} samples", training->size(),
      validation == nullptr ? 0 : validation->size(), total_steps,
      std::min(batch.global, training->size()));
  if (dist.world_size() > 1) say("{}", comm::describe(*dist.world()));
  if (const std::string note =
          batch_note(batch, dist.data_size(), begun, config.parallel.ranks_together());
      !note.empty())
    say("{}", note);

  TrainingResult result = Trainer(dist, task, options).fit(training, validation);
  if (result.end != TrainingResult::End::left) {
    say_end(say, config, result);
    say_files(say, options, result);
  }
  return said_at_the_end(say, std::move(result));
}

}  // namespace lockstep::train
