// `lockstep train` of a model of one's own: the library that it is in, and its run.
#include <dlfcn.h>

#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/base/file.h>
#include <lockstep/base/text.h>
#include <lockstep/base/version.h>
#include <lockstep/comm/world/join.h>
#include <lockstep/device/device_manager.h>
#include <lockstep/distributed/rank_messages.h>
#include <lockstep/recovery/load_together.h>
#include <lockstep/train/job_config.h>
#include <lockstep/train/own_model.h>
#include <lockstep/train/preflight/run_plan.h>
#include <lockstep/train/reporter.h>
#include <lockstep/train/stop_request.h>
#include <lockstep/train/train_language_model.h>
#include <lockstep/train/trainer.h>

namespace lockstep::train {

namespace {

std::map<std::string, MakeOwnModel>& own_models() {
  static std::map<std::string, MakeOwnModel> models;
  return models;
}

constexpr std::string_view kMark = "LockstepModelLibrary";

// "Lockstep 0.1.0, LibTorch 2.6.0, libstdc++"; empty where the file does not say.
std::string built_with(const std::filesystem::path& library) {
  const MappedFile file(library);
  const std::string_view bytes(reinterpret_cast<const char*>(file.bytes().data()), file.size());
  constexpr std::size_t kLongest = 200;
  for (auto at = bytes.find(kMark); at != bytes.npos; at = bytes.find(kMark, at + 1)) {
    const std::string_view text = bytes.substr(at + kMark.size(), kLongest);
    const auto end = text.find('}');
    // This file's own text is in every library that has it.
    if (text.starts_with("{Lockstep ") && !text.starts_with("{Lockstep ?") && end != text.npos)
      return std::string(text.substr(1, end - 1));
  }
  return "";
}

// The same of this program.
std::string own_build() {
  std::string text = LOCKSTEP_BUILT_WITH("?");
  text = text.substr(kMark.size() + 1, text.size() - kMark.size() - 2);
  return text.replace(text.find('?'), 1, version());
}

// The maker of the model of this name. The library stays loaded. UsageError if the file is not
// there, is no such library, was built with another Lockstep, LibTorch or standard library (told
// before anything in it runs), cannot be loaded, or has no model of the name.
MakeOwnModel load_own_model(const std::filesystem::path& library, const std::string& name) {
  const std::string theirs = built_with(library), ours = own_build();
  if (theirs.empty())
    throw UsageError("model.library is '{}', which has no model for lockstep train: register one "
                     "with LOCKSTEP_MODEL(\"{}\", …), and link Lockstep::model_library",
                     library.string(), name);
  if (theirs != ours)
    throw UsageError("model.library is '{}', built with {}, and this is {}: build the library "
                     "anew against this installation",
                     library.string(), theirs, ours);
  // A library registers its models once, however often it is asked for.
  static std::map<std::filesystem::path, std::map<std::string, MakeOwnModel>> loaded;
  if (!loaded.contains(library)) {
    own_models().clear();
    if (::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE) == nullptr)
      throw UsageError("model.library cannot be loaded: {}", ::dlerror());
    loaded[library] = own_models();
  }
  const auto& models = loaded[library];
  std::vector<std::string> names;
  for (const auto& [one, make] : models) names.push_back(fmt::format("\"{}\"", one));
  const auto found = models.find(name);
  if (found == models.end())
    throw UsageError("model.name is \"{}\", and '{}' has {}", name, library.string(),
                     names.empty() ? "no model" : fmt::format("{}", fmt::join(names, ", ")));
  return found->second;
}

std::int64_t num_weights(torch::nn::Module& model) {
  std::int64_t sum = 0;
  for (const at::Tensor& weight : model.parameters()) sum += weight.numel();
  return sum;
}

}  // namespace

bool register_own_model(const std::string& name, MakeOwnModel make) {
  own_models()[name] = std::move(make);
  return true;
}

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
