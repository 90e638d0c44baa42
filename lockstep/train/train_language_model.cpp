#include <lockstep/train/train_language_model.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/Parallel.h>
#include <spdlog/fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/durable_file.h>
#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/base/file.h>
#include <lockstep/base/log.h>
#include <lockstep/base/text.h>
#include <lockstep/comm/world/join.h>
#include <lockstep/data/dataset.h>
#include <lockstep/device/device_manager.h>
#include <lockstep/distributed/rank_messages.h>
#include <lockstep/models/spec/family.h>
#include <lockstep/models/spec/hugging_face.h>
#include <lockstep/observe/terminal.h>
#include <lockstep/parallel/pipeline/schedule/drawing.h>
#include <lockstep/parallel/pipeline/schedule/schedule_file.h>
#include <lockstep/train/config/names.h>
#include <lockstep/train/job_config.h>
#include <lockstep/train/language_model_task.h>
#include <lockstep/train/main_rank.h>
#include <lockstep/train/preflight/memory_fit.h>
#include <lockstep/train/preflight/resume_check.h>
#include <lockstep/train/preflight/run_layout.h>
#include <lockstep/train/preflight/run_plan.h>
#include <lockstep/train/preflight/run_start.h>
#include <lockstep/train/reporter.h>
#include <lockstep/train/stop_request.h>
#include <lockstep/train/trainer.h>

namespace lockstep::train {

std::filesystem::path timeline_file(const TrainConfig& config) {
  return config.output / "timeline.svg";
}

bool draw_timeline(const pipeline::Timeline& timeline, const TrainConfig& config,
                   const RunPipeline& run) {
  const std::string title =
      fmt::format("{}, measured in step {}", run.schedule.name, config.parallel.timeline_step);
  const std::string subtitle =
      fmt::format("{} ranks, {} stages, {} micro-batches", run.schedule.num_ranks(),
                  run.schedule.num_stages(), run.schedule.num_micro_batches);
  try {
    write_durably(
        timeline_file(config),
        pipeline::draw_svg(timeline, {.title = title, .subtitle = subtitle, .time_unit = "s"}));
    return true;
  } catch (const FileError& error) {
    log::warn("the timeline of step {} was not drawn: {}", config.parallel.timeline_step,
              error.what());
    return false;
  }
}

namespace {

std::string text_of(const char* what, const data::TokenStream& stream) {
  const DataDigest all = digest(stream);
  return fmt::format("the {} data has {} tokens with a checksum of {:08x}", what, all.num_tokens,
                     all.crc32c);
}

void check_same_files(const ResolvedRun& run, const RankMessages& ranks) {
  std::vector<std::string> lines;
  add_config_lines(models::to_hugging_face(run.model), "the model's ", lines);
  if (run.pipeline)
    add_config_lines(pipeline::to_text(run.pipeline->schedule), "the schedule's ", lines);
  lines.push_back(text_of("training", run.training.stream()));
  if (run.validation) lines.push_back(text_of("validation", run.validation->stream()));
  check_told_the_same(lines, ranks);
}

// Such as " (tensor 2, pipeline 2 by 1f1b, FULL_SHARD, bf16)".
std::string layout_text(const TrainConfig& config) {
  std::vector<std::string> parts;
  const ParallelSection& parallel = config.parallel;
  if (parallel.tensor > 1)
    parts.push_back(fmt::format("tensor {}{}", parallel.tensor,
                                parallel.sequence_parallel ? " with sequences" : ""));
  if (parallel.pipeline > 1)
    parts.push_back(fmt::format("pipeline {} by {}", parallel.pipeline,
                                parallel.schedule_file.empty()
                                    ? std::string(pipeline::name_of(parallel.schedule))
                                    : parallel.schedule_file.filename().string()));
  if (parallel.context > 1) parts.push_back(fmt::format("context {}", parallel.context));
  if (cuts_optimizer(config.sharding.strategy))
    parts.emplace_back(name_of(config.sharding.strategy));
  if (config.precision.compute != Precision::fp32)
    parts.emplace_back(name_of(config.precision.compute, kPrecisions));
  return parts.empty() ? "" : fmt::format(" ({})", fmt::join(parts, ", "));
}

// Such as "input.txt read as text, 1.1 M tokens".
std::string data_text(const data::TokenStream& stream) {
  const data::TokenFormat& format = stream.files().front().format();
  const std::string first = stream.files().front().path().filename().string();
  const std::size_t others = stream.files().size() - 1;
  return fmt::format("{}{} read as {}, {} tokens", first,
                     others == 0 ? "" : fmt::format(" and {} more", others), format.name,
                     count_text(static_cast<double>(stream.size())));
}

// Lines about settings of the config that have no effect on a CPU.
std::vector<std::string> said_of_cpus(const TrainConfig& config) {
  std::vector<std::string> lines;
  const std::string_view precision = name_of(config.precision.compute, kPrecisions);
  const std::string_view strategy = name_of(config.sharding.strategy);
  if (config.precision.compute != Precision::fp32)
    lines.push_back(
        cuts_gradients(config.sharding.strategy)
            ? fmt::format("on a CPU {} is what ranks send each other of parameters; operators "
                          "compute in fp32",
                          precision)
            : fmt::format("{} changes nothing on a CPU with {}: parameters are fp32 on every rank, "
                          "and operators compute in fp32",
                          precision, strategy));
  if (config.sharding.offload_optimizer == OffloadDevice::cpu)
    lines.emplace_back("offload changes nothing on a CPU: the run's state is in the host's memory "
                       "already");
  return lines;
}

// The memory for this rank's tensors, and how many ranks share it.
MemoryThere memory_there(const DistributedManager& dist) {
  const device::DeviceManager& device = dist.device_manager();
  const int num_ranks = read_launch_environment().local_world_size;
  const bool on_cpu = dist.device().is_cpu();
  const int num_devices = on_cpu ? 1 : std::max(1, device.num_devices());
  return {.bytes = static_cast<std::int64_t>(device.memory().total_bytes),
          .num_ranks_sharing = (num_ranks + num_devices - 1) / num_devices,
          .what = on_cpu ? "this host" : device.name(),
          .host_bytes = static_cast<std::int64_t>(device.host_memory().total_bytes),
          .num_ranks_on_host = num_ranks};
}

}  // namespace

TrainingResult train_language_model(const TrainConfig& config, int output_fd,
                                    std::shared_ptr<PeerCopies> peer_copies) {
  DistributedManager dist = setup_distributed(distributed_config(config));
  // All ranks are there: from here on, a rank that is told to end restores the run's state, saves
  // it and ends. Before this point it would wait in vain for ranks that have ended.
  const StopRequest stop;
  at::set_num_threads(num_threads(config.threads_per_rank, dist));
  Speaker say(dist, output_fd);
  const RankMessages ranks(dist.world());
  check_same_config(config, ranks);
  const ResolvedRun run = resolve_run(config, dist.world_size(), begun_batch_of_job(config, dist));
  check_same_files(run, ranks);
  // Copies in the ranks' memory are of this very run; no checkpoint needs to be whole then.
  const bool in_memory =
      config.checkpoint.memory_interval > 0 && peer_copies->newest_step(ranks).has_value();
  std::vector<std::string> changed;
  std::string memory_note;
  on_main_rank(dist, [&] {
    // The files are checked only by ranks that load them.
    if (!in_memory) changed = check_resume(config, run, this_generation());
    // The estimate has no formula for the memory of model parallelism.
    if (config.parallel.ranks_together() > 1) return std::string();
    RunMemory memory(config, run.model,
                     dist.device().is_cpu() ? plan::Device::cpu : plan::Device::gpu);
    memory_note = judge_memory(
        memory,
        memory.configured(dist.world_size(), read_launch_environment().local_world_size, run.begun),
        memory_there(dist));
    return std::string();
  });

  pipeline::Timeline timeline;
  bool drawn = false;
  SpreadLanguageModel made = make_language_model(config, run, dist, [&](const auto& measured) {
    timeline = measured;
    if (dist.is_main()) drawn = draw_timeline(timeline, config, *run.pipeline);
  });
  const std::string what = fmt::format(
      "{}, {} parameters, {} rank{}{} on {}", models::family_named(run.model.family).title,
      count_text(static_cast<double>(models::num_parameters(run.model))), dist.world_size(),
      dist.world_size() == 1 ? "" : "s", layout_text(config), dist.device_manager().name());
  say("{}, {} thread{} each", what, at::get_num_threads(), at::get_num_threads() == 1 ? "" : "s");
  say("{}; a vocabulary of {} tokens", data_text(run.training.stream()), run.model.vocab_size);
  say("{} sequences of {} tokens to train on, {} to validate; {} steps of {} sequences",
      run.training.size(), config.data.sequence_length, run.validation ? run.validation->size() : 0,
      run.total_steps, std::min(run.batch.global, run.training.size()));
  if (dist.world_size() > 1) say("{}", comm::describe(*dist.world()));
  if (const std::string note =
          batch_note(run.batch, dist.data_size(), run.begun, config.parallel.ranks_together());
      !note.empty())
    say("{}", note);
  if (dist.device().is_cpu())
    for (const std::string& line : said_of_cpus(config)) say("{}", line);
  if (!memory_note.empty()) say("{}", memory_note);
  if (run.pipeline)
    if (const std::string note = idle_note(*run.pipeline); !note.empty()) say("{}", note);
  if (!changed.empty()) say("other than in the checkpoint: {}", fmt::join(changed, "; "));

  TrainerOptions options = trainer_options(config, dist.device());
  options.batch_size = run.most_micro;
  options.samples_per_step = run.batch.global;
  options.schedule = run.schedule;
  options.flops_per_unit = models::training_flops_per_token(run.model, config.data.sequence_length);
  options.peer_copies = std::move(peer_copies);
  options.progress_fd = output_fd;
  options.title = what;
  double entropy = 0;
  if (dist.is_main()) {
    entropy = unigram_entropy(run.training.stream());
    options.reference_loss = {.label = "unigram entropy", .value = entropy};
  }
  std::shared_ptr<const data::Dataset> validation;
  if (run.validation) validation = std::make_shared<data::TokenDataset>(*run.validation);
  std::map<std::string, std::string> about_data;
  if (dist.is_main()) about_data[kDataFile] = to_text(digest(run.training.stream()));
  Trainer trainer(dist,
                  std::make_shared<LanguageModelTask>(made.model, std::move(about_data),
                                                      std::move(made.pipeline)),
                  options);
  TrainingResult result =
      trainer.fit(std::make_shared<data::TokenDataset>(run.training), validation);
  if (result.end == TrainingResult::End::left) return said_at_the_end(say, std::move(result));
  say_end(say, config, result, fmt::format(" (the unigram entropy is {:.4f})", entropy));
  if (!timeline.ranks.empty())
    say("{}", pipeline::draw_text(timeline, {.width = observe::terminal_width(output_fd),
                                             .characters = observe::locale_characters()}));
  say_files(say, options, result);
  if (drawn) say.file("timeline", timeline_file(config));
  return said_at_the_end(say, std::move(result));
}

}  // namespace lockstep::train
