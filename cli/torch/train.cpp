// `lockstep train`, one rank of it.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>

#include <lockstep/base/durable_file.h>
#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/launch/rank_side/report.h>
#include <lockstep/net/fd.h>
#include <lockstep/recovery/keep_going.h>
#include <lockstep/recovery/peer_copies.h>
#include <lockstep/train/preflight/memory_fit.h>
#include <lockstep/train/preflight/run_plan.h>
#include <lockstep/train/stop_request.h>
#include <lockstep/train/train_language_model.h>

#include <cli/train_flags.h>

namespace lockstep::cli {

namespace {

int stopped(const Error& error) {
  fmt::print(stderr, "lockstep: {}\n", error.what());
  return kTrainingStopped;
}

// One generation of the job. `output_error` becomes the errno with which a part of the output was
// lost that somebody wanted.
int train_once(const TrainFlags& flags, const std::shared_ptr<PeerCopies>& peer_copies,
               int& output_error) {
  net::Fd output;
  if (!flags.output.empty() && read_launch_environment().rank == 0)
    output = net::Fd(::open(flags.output.c_str(), O_WRONLY | O_CLOEXEC | O_NOCTTY | O_APPEND));
  const LaunchEnvironment launch = read_launch_environment();
  train::ConfigDraft draft = train::read_config(
      flags.config, flags.overrides,
      launch.generation > 0 ? train::NamedFiles::of_run_under_way : train::NamedFiles::checked);
  // All that is wrong is told now, and not some of it when the ranks have met.
  const train::TrainConfig& config = draft.config();
  const bool own = config.model_of == train::ModelOf::library;
  if (draft.has_mistakes()) {
    if (own)
      train::resolve_own_run(draft, launch.world_size);
    else
      train::resolve_run(draft, launch.world_size);
  }
  if (launch.rank == 0 && launch.generation == 0) warn_of_keys_without_effect(draft);
  try {
    const int output_fd = output ? output.get() : STDOUT_FILENO;
    const auto result = own ? train::train_own_model(config, output_fd, peer_copies)
                            : train::train_language_model(config, output_fd, peer_copies);
    if (result.output_error != 0 && result.output_error != EPIPE)
      output_error = result.output_error;
    return result.end == train::TrainingResult::End::interrupted ? 128 + result.signal : 0;
  } catch (const train::TrainingStopped& error) {
    // All ranks stop for the same reason. The main rank says it and has the exit code: were another
    // the first to fail, the launcher would end the main rank, perhaps before it has spoken.
    if (read_launch_environment().rank != 0) return 0;
    return stopped(error);
  } catch (const FileError& error) {
    return stopped(error);
  } catch (const std::exception& error) {
    if (!train::is_out_of_memory(error)) throw;
    throw UsageError("{}", train::out_of_memory_advice(config, error));
  }
}

int train_to_the_end(Arguments arguments) {
  const auto flags = parse_train_flags(arguments);
  if (!flags) return 0;
  ::signal(SIGPIPE, SIG_IGN);  // a reader who goes away does not end the training
  int code = 0, output_error = 0;
  const auto peer_copies = std::make_shared<PeerCopies>();
  keep_going([&] { code = train_once(*flags, peer_copies, output_error); });
  if (output_error == 0) return code;
  fmt::print(stderr,
             "lockstep: the standard output cannot be written: {}; all else was done as if it "
             "had been\n",
             std::strerror(output_error));
  return code != 0 ? code : kTrainingStopped;
}

}  // namespace

// Whatever it says itself of why it ends would be the same after a restart.
int train(Arguments arguments) {
  try {
    const int code = train_to_the_end(arguments);
    if (code != 0) report_final_failure();
    return code;
  } catch (const UsageError&) {
    report_final_failure();
    throw;
  }
}

}  // namespace lockstep::cli
