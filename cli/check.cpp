// `lockstep check`: `check hang` here, what needs LibTorch in lockstep-torch.
#include <filesystem>
#include <vector>

#include <lockstep/base/error.h>
#include <lockstep/flight/report.h>

#include <cli/dispatch.h>
#include <cli/flags.h>

namespace lockstep::cli {

namespace {

// How long --now waits for ranks: those that can answer do so much faster.
constexpr milliseconds kLongestAnswer{3000};

// Exit status: 0 where nothing hangs, 1 where something does or has failed, 2 for a mistake.
int check_hang(Arguments arguments) {
  CLI::App app("Tells what a job hangs on, from the dumps that its ranks have left in DIR.\n"
               "Exit status: 0 where nothing hangs, 1 where something does or has failed, 2 for a "
               "mistake in the command.",
               "lockstep check hang");
  show_usage(app, "[FLAGS] DIR");
  bool json = false;
  bool now = false;
  app.add_flag("--now", now, "ask the ranks on this host for dumps first: the job goes on");
  app.add_flag("--json", json, "everything, for programs");
  app.footer("DIR is what LOCKSTEP_FLIGHT_DIR said where the job was started; lockstep run names "
             "its own when a job fails.\nExample: lockstep check hang --now /tmp/flight");
  const SplitArguments split = split_at_words(app, arguments, 1);
  if (!parse_flags(app, split.flags)) return 0;
  if (split.program.empty())
    throw UsageError("lockstep check hang needs the folder of the dumps: what LOCKSTEP_FLIGHT_DIR "
                     "said, or what lockstep run named when the job failed");
  const std::filesystem::path directory = split.program.front();
  std::error_code error;
  if (!std::filesystem::is_directory(directory, error))
    throw UsageError("'{}' is no folder: give the one where the ranks leave their dumps",
                     directory.string());
  const flight::Evidence evidence =
      now ? flight::demand_evidence(directory, kLongestAnswer) : flight::read_evidence(directory);
  if (evidence.dumps.empty()) {
    std::string left_out;
    for (const std::string& note : evidence.left_out) left_out += "\n  left out: " + note;
    throw UsageError("'{}' has no dumps that could be read{}{}", directory.string(),
                     now ? ": no rank of a job answers there"
                         : "; ranks leave them when a call fails, or when asked: --now",
                     left_out);
  }
  fmt::print("{}", json ? flight::merged_report_json(evidence) : flight::merged_report(evidence));
  return flight::hangs(evidence.dumps) ? 1 : 0;
}

}  // namespace

int check(Arguments arguments) {
  if (!arguments.empty() && arguments.front() == "hang") return check_hang(arguments.subspan(1));
  std::vector<std::string> words = {"lockstep", "check"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  become_torch_program("check", argv.data());
}

}  // namespace lockstep::cli
