#include <cli/train_flags.h>

#include <lockstep/base/error.h>

#include <cli/flags.h>

namespace lockstep::cli {

std::optional<TrainFlags> parse_train_flags(Arguments arguments) {
  CLI::App app("Trains a language model as a config file says, and resumes a run that was ended.",
               "lockstep train");
  show_usage(app, "[FLAGS] CONFIG.json");
  app.footer(
      "Example: lockstep train config.json --nproc-per-node 2 --set optimizer.params.lr=3e-4\n"
      "docs/config.md lists every key of the config. Ctrl-C saves a checkpoint and ends;\n"
      "the same command goes on from there.");
  TrainFlags flags;
  app.add_option("--nproc-per-node", flags.num_ranks,
                 "ranks to start on this host: a number, auto, cpu, gpu, or gpu:N (1)");
  app.add_option("--set", flags.overrides, "KEY=VALUE in place of what the config has; repeatable")
      ->allow_extra_args(false);
  app.add_option("--output", flags.output)->group("");
  SplitArguments split = split_at_words(app, arguments, 1);
  if (!parse_flags(app, std::move(split.flags))) return std::nullopt;
  if (split.program.empty())
    throw UsageError("no config file was given: lockstep train CONFIG.json (docs/config.md has one "
                     "to start from)");
  flags.config = split.program.front();
  return flags;
}

}  // namespace lockstep::cli
