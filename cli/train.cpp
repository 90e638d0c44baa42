// `lockstep train`: finds every mistake that a config can have, then starts the ranks.
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/elastic/launch.h>
#include <lockstep/train/config.h>
#include <lockstep/train/plan.h>

#include <cli/num_ranks.h>
#include <cli/train_flags.h>

namespace lockstep::cli {

namespace {

// Ranks write a checkpoint before they end.
constexpr milliseconds kGrace{120'000};

// Where the main rank can write without the launcher's marks in front of its lines: this process's
// standard output, where that can be opened a second time. A file cannot, as each opening has a
// position of its own.
std::string output_for_ranks() {
  struct stat info {};
  if (::fstat(STDOUT_FILENO, &info) != 0) return "";
  if (!S_ISCHR(info.st_mode) && !S_ISFIFO(info.st_mode)) return "";
  return fmt::format("/proc/{}/fd/{}", ::getpid(), STDOUT_FILENO);
}

int become_a_rank(Arguments arguments) {
  std::vector<std::string> words = {torch_program("train").string(), "train"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  ::execv(argv[0], argv.data());
  throw UsageError("cannot start {}: {}", words[0], std::strerror(errno));
}

}  // namespace

int train(Arguments arguments) {
  const auto flags = parse_train_flags(arguments);
  if (!flags) return 0;
  if (read_launch_environment().launcher != Launcher::none) {
    if (!flags->num_ranks.empty())
      throw UsageError("--nproc-per-node {}: this is already a rank, started by {}, which says how "
                       "many there are: leave the flag out",
                       flags->num_ranks, launcher_name(read_launch_environment().launcher));
    return become_a_rank(arguments);
  }
  const int num_ranks = flags->num_ranks.empty() ? 1 : num_local_ranks(flags->num_ranks);
  train::plan_run(train::load_config(flags->config, flags->overrides), num_ranks);

  elastic::LaunchOptions options;
  options.program = {torch_program("train").string(), "train", flags->config};
  for (const std::string& override : flags->overrides)
    options.program.insert(options.program.end(), {"--set", override});
  if (const std::string output = output_for_ranks(); !output.empty())
    options.program.insert(options.program.end(), {"--output", output});
  options.program_kind = elastic::ProgramKind::executable;
  options.num_local_ranks = num_ranks;
  options.grace = kGrace;
  return elastic::launch(options);
}

}  // namespace lockstep::cli
