// `lockstep train`: finds every mistake that a config can have, then starts the ranks.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <optional>
#include <string>

#include <lockstep/base/durable_file.h>
#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/base/folder_lock.h>
#include <lockstep/checkpoint/format/reader.h>
#include <lockstep/device/host/host.h>
#include <lockstep/launch/launch.h>
#include <lockstep/launch/processes/rank_setup.h>
#include <lockstep/launch/rank_side/report.h>
#include <lockstep/models/spec/config.h>
#include <lockstep/train/config/config.h>
#include <lockstep/train/preflight/memory_fit.h>
#include <lockstep/train/preflight/resume_check.h>
#include <lockstep/train/preflight/run_layout.h>
#include <lockstep/train/preflight/run_plan.h>
#include <lockstep/train/preflight/run_start.h>

#include <cli/flags.h>
#include <cli/layout_report.h>
#include <cli/train_flags.h>

namespace lockstep::cli {

namespace {

namespace fs = std::filesystem;

constexpr double kMiB = 1 << 20;

void check_device(const train::TrainConfig& config) {
  if (config.device == train::DeviceChoice::cuda && launch::num_visible_gpus() == 0)
    throw UsageError("device is \"cuda\", and this host has no GPU that is visible: take \"auto\", "
                     "or look at CUDA_VISIBLE_DEVICES and at what lockstep check says");
}

// Checks the host's memory. On GPUs the ranks check their memory themselves, and warn if it is
// tight.
void check_memory(const train::TrainConfig& config, const train::ResolvedRun& run, int num_ranks) {
  if (config.device != train::DeviceChoice::cpu && launch::num_visible_gpus() > 0) return;
  // There is no formula yet for the memory of model parallelism.
  if (config.parallel.ranks_together() > 1) return;
  train::RunMemory memory(config, run.model, plan::Device::cpu);
  const auto there = static_cast<std::int64_t>(device::Host().memory().total_bytes);
  train::judge_memory(memory, memory.configured(num_ranks, num_ranks, run.begun),
                      {.bytes = there, .num_ranks_sharing = num_ranks, .what = "this host"});
}

// Asks for room for one checkpoint only: older ones may be removed to make room for it.
void check_disk(const train::TrainConfig& config, const train::ResolvedRun& run) {
  fs::path folder = fs::absolute(config.output);
  std::error_code unknown;
  while (!fs::exists(folder, unknown) && folder.has_relative_path()) folder = folder.parent_path();
  const fs::space_info space = fs::space(folder, unknown);
  if (unknown) return;
  const optim::OptimizerOptions& optimizer = config.optimizer.options;
  const double needed = (4 + optimizer.saved_state_bytes().value_or(optimizer.state_bytes())) *
                        static_cast<double>(models::num_parameters(run.model));
  const auto there = static_cast<double>(space.available);
  if (needed <= there) return;
  throw UsageError("a checkpoint of this run takes {:.1f} MiB, and the disk of '{}' has {:.1f} MiB "
                   "left: make room, or choose another output",
                   needed / kMiB, folder.string(), there / kMiB);
}

// The main rank will hold the lock; a mistake is found here before any rank starts.
void check_no_other_run(const std::filesystem::path& output) {
  std::error_code unknown;
  if (std::filesystem::is_directory(output, unknown)) const FolderLock looked(output);
}

// UsageError with the numbers and the way out, where there is no GPU though the config asks for
// one, too little memory or disk, or another run in the run's folder.
void check_machine(const train::TrainConfig& config, const train::ResolvedRun& run, int num_ranks) {
  check_device(config);
  check_memory(config, run, num_ranks);
  check_no_other_run(config.output);
  check_disk(config, run);
}

struct HostRange {
  int least = 1;
  int most = 1;
};

constexpr int kMostRows = 64;

// "8", or "10 or 11" where shares differ.
std::string samples_of_a_rank(const train::BatchShares& shares) {
  const std::int64_t least = shares.batch.global / shares.num_data_ranks;
  if (shares.batch.global % shares.num_data_ranks == 0) return std::to_string(least);
  return fmt::format("{} or {}", least, least + 1);
}

// "3", or "2:4". UsageError where it is neither, or there are too many of them.
HostRange parse_host_range(const std::string& text) {
  const auto colon = text.find(':');
  HostRange hosts;
  hosts.least = parse_integer(text.substr(0, colon), "--nnodes", 1, kMostRanks);
  hosts.most = colon == std::string::npos
                   ? hosts.least
                   : parse_integer(text.substr(colon + 1), "--nnodes", 1, kMostRanks);
  if (hosts.least > hosts.most)
    throw UsageError("--nnodes {}: the least number of hosts comes first: give --nnodes {}:{}",
                     text, hosts.most, hosts.least);
  if (hosts.most - hosts.least >= kMostRows)
    throw UsageError("--nnodes {}: --describe shows up to {} numbers of hosts: give fewer", text,
                     kMostRows);
  return hosts;
}

// A row for each: samples of a rank, and its passes. `run` is the one on the most hosts.
std::string size_report(const train::TrainConfig& config, const train::ResolvedRun& run,
                        const HostRange& hosts, int ranks_per_host) {
  if (hosts.least == hosts.most) return "";
  // A run that has not begun is taken to begin on the most hosts.
  const train::BegunBatch begun =
      run.begun.value_or(train::BegunBatch{.global = run.batch.global, .micro = run.most_micro});
  std::string text =
      fmt::format("\nThe run keeps its steps of {} samples when hosts leave and come:\n"
                  "hosts  ranks  samples of a rank  passes  of at most\n",
                  begun.global);
  for (int num_hosts = hosts.least; num_hosts <= hosts.most; ++num_hosts) {
    text += fmt::format("{:>5}  {:>5}  ", num_hosts, num_hosts * ranks_per_host);
    try {
      const train::BatchShares shares =
          train::share_batch(config, run.model, num_hosts * ranks_per_host, begun);
      text += fmt::format("{:>17}  {:>6}  {:>10}\n", samples_of_a_rank(shares),
                          shares.batch.accumulation, shares.batch.micro);
    } catch (const UsageError& error) {
      text += fmt::format("cannot be: {}\n", error.what());
    }
  }
  return text;
}

// Ranks write a checkpoint before they end, where a user ends them; after a failure they cannot.
constexpr milliseconds kInterruptGrace{120'000};
constexpr milliseconds kGrace{2000};

// After which ranks save and end.
constexpr int kStopSignals[] = {SIGINT, SIGTERM, SIGHUP};

// Where the main rank can write without the launcher's marks in front of its lines: this process's
// standard output, where that can be opened a second time. A file cannot, as each opening has a
// position of its own.
std::string output_for_ranks() {
  struct stat info {};
  if (::fstat(STDOUT_FILENO, &info) != 0) return "";
  if (!S_ISCHR(info.st_mode) && !S_ISFIFO(info.st_mode)) return "";
  return fmt::format("/proc/{}/fd/{}", ::getpid(), STDOUT_FILENO);
}

// Tells a user whose run ended early how to go on, where its ranks have not said it themselves. The
// ranks of a job that may be restarted may have been told to end when they could not save.
void say_how_to_go_on(const train::TrainConfig& config,
                      const std::optional<checkpoint::Checkpoint>& before, int max_restarts,
                      int code) {
  if (code == 0 || code == kUsageMistake || code == kTrainingStopped) return;
  const bool told_to = std::any_of(std::begin(kStopSignals), std::end(kStopSignals),
                                   [&](int signal) { return code == 128 + signal; });
  const auto newest = checkpoint::newest_usable(config.output / "checkpoints").checkpoint;
  if (told_to && newest != before && max_restarts == 0) return;
  if (newest)
    fmt::print(stderr, "lockstep: {} ('{}')\n", train::how_to_go_on(config, newest->step),
               newest->path.string());
  else if (told_to)
    fmt::print(stderr, "lockstep: nothing was saved: the same command starts anew\n");
}

[[noreturn]] void become_a_rank(Arguments arguments) {
  std::vector<std::string> words = {"lockstep-torch", "train"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  become_torch_program("train", argv.data());
}

// Nothing is trained: the config may be of a cluster that this host has no part of.
int describe(const TrainFlags& flags, train::ConfigDraft& draft, int ranks_per_host) {
  const HostRange hosts = parse_host_range(flags.num_hosts.empty() ? "1" : flags.num_hosts);
  const int num_hosts = hosts.most;
  if (ranks_per_host > kMostRanks / num_hosts)
    throw UsageError("{} hosts of {} ranks are more than {}: ask for fewer", num_hosts,
                     ranks_per_host, kMostRanks);
  const int num_ranks = num_hosts * ranks_per_host;
  const train::TrainConfig& config = draft.config();
  const train::ResolvedRun resolved =
      train::resolve_run(draft, num_ranks, train::begun_batch(config, /*now=*/{}));
  warn_of_keys_without_effect(draft);
  const train::RunLayout layout = train::layout_of(config, resolved, num_ranks, ranks_per_host);
  const DescribedRun run{.config = config, .resolved = resolved, .layout = layout};
  if (!flags.svg.empty()) write_durably(flags.svg, layout_svg(run));
  fmt::print("{}{}",
             layout_report(run, {.width = observe::terminal_width(STDOUT_FILENO),
                                 .characters = observe::locale_characters()}),
             size_report(config, resolved, hosts, ranks_per_host));
  return 0;
}

int become_a_rank_or_launch(Arguments arguments) {
  const auto flags = parse_train_flags(arguments);
  if (!flags) return 0;
  if (read_launch_environment().launcher != Launcher::none) {
    if (!flags->num_ranks.empty())
      throw UsageError("--nproc-per-node {}: this is already a rank, started by {}, which says how "
                       "many there are: leave the flag out",
                       flags->num_ranks, launcher_name(read_launch_environment().launcher));
    for (const auto& [flag, value] :
         {std::pair("--max-restarts", flags->max_restarts), std::pair("--spares", flags->spares),
          std::pair("--stuck-after", flags->stuck_after)})
      if (!value.empty())
        throw UsageError("{} {}: this is already a rank, started by {}: give the flag there", flag,
                         value, launcher_name(read_launch_environment().launcher));
    become_a_rank(arguments);
  }
  const int num_ranks = flags->num_ranks.empty() ? 1 : num_local_ranks(flags->num_ranks);
  train::ConfigDraft draft = train::read_config(flags->config, flags->overrides);
  if (flags->describe) return describe(*flags, draft, num_ranks);
  const train::TrainConfig& config = draft.config();
  const auto begun = train::begun_batch(config, /*now=*/{});
  if (config.model_of == train::ModelOf::library) {
    train::resolve_own_run(draft, num_ranks, begun);
    check_device(config);
    check_no_other_run(config.output);
    train::checkpoint_to_resume(config, /*now=*/{});
  } else {
    const train::ResolvedRun resolved = train::resolve_run(draft, num_ranks, begun);
    check_machine(config, resolved, num_ranks);
    train::check_resume(config, resolved);
  }

  launch::LaunchOptions options;
  options.program = {torch_program("train").string(), "train", flags->config};
  for (const std::string& override : flags->overrides)
    options.program.insert(options.program.end(), {"--set", override});
  if (const std::string output = output_for_ranks(); !output.empty())
    options.program.insert(options.program.end(), {"--output", output});
  options.program_kind = launch::ProgramKind::executable;
  options.num_local_ranks = num_ranks;
  options.grace = kGrace;
  options.interrupt_grace = kInterruptGrace;
  if (!flags->max_restarts.empty())
    options.max_restarts = parse_integer(flags->max_restarts, "--max-restarts", 0, kMostRanks);
  if (!flags->spares.empty()) {
    options.num_spares = parse_integer(flags->spares, "--spares", 0, kMostRanks);
    if (options.max_restarts == 0)
      throw UsageError("--spares {} is for restarts, and there are none: give --max-restarts too",
                       flags->spares);
  }
  if (!flags->stuck_after.empty())
    options.stuck_after = parse_seconds(flags->stuck_after, "--stuck-after");
  options.explained_exit_codes = {kUsageMistake, kTrainingStopped};
  for (const int signal : kStopSignals) options.explained_exit_codes.push_back(128 + signal);
  options.interruption_note =
      "told to end: saving after this step; once more (Ctrl-C) ends at once";
  const auto before = checkpoint::newest_usable(config.output / "checkpoints").checkpoint;
  const int code = launch::launch(options);
  say_how_to_go_on(config, before, options.max_restarts, code);
  return code;
}

}  // namespace

int train(Arguments arguments) {
  try {
    return become_a_rank_or_launch(arguments);
  } catch (const UsageError&) {
    report_final_failure();  // as a rank
    throw;
  }
}

}  // namespace lockstep::cli
