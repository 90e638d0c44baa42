#include <cli/train_flags.h>

#include <lockstep/base/error.h>
#include <lockstep/train/config/config.h>

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
  app.add_option("--max-restarts", flags.max_restarts,
                 "how often ranks are started anew after a failure, from the last checkpoint (0)");
  app.add_option("--spares", flags.spares,
                 "processes that stand by to take the place of ranks that are lost (0)");
  app.add_option("--stuck-after", flags.stuck_after,
                 "a rank that has finished no step for so many seconds has failed: more than a "
                 "validation or a checkpoint takes (never)");
  app.add_option("--set", flags.overrides,
                 "one value in place of what the config has; may be given again")
      ->type_name("KEY=VALUE")
      ->allow_extra_args(false);
  app.add_flag(
      "--describe", flags.describe,
      "show the mesh, and which layers, shards and data each rank has; nothing is trained");
  app.add_option("--svg", flags.svg, "with --describe: a file for the picture");
  app.add_option("--nnodes", flags.num_hosts,
                 "with --describe: hosts, each with the ranks of --nproc-per-node (1); MIN:MAX "
                 "shows the most of them, and the batch on each number");
  bool schema = false;
  app.add_flag("--schema", schema, "print a JSON Schema of configs, for editors");
  app.add_option("--output", flags.output)->group("");
  SplitArguments split = split_at_words(app, arguments, 1);
  if (!parse_flags(app, std::move(split.flags))) return std::nullopt;
  if (schema) {
    fmt::print("{}", train::config_schema());
    return std::nullopt;
  }
  if (split.program.empty())
    throw UsageError("no config file was given: lockstep train CONFIG.json (docs/config.md has one "
                     "to start from)");
  for (const auto& [flag, value] : {std::pair<const char*, const std::string&>("--svg", flags.svg),
                                    {"--nnodes", flags.num_hosts}})
    if (!flags.describe && !value.empty())
      throw UsageError("{} is for --describe{}", flag,
                       std::string_view(flag) == "--nnodes"
                           ? ": `lockstep run --nnodes` starts ranks on several hosts"
                           : "");
  flags.config = split.program.front();
  return flags;
}

}  // namespace lockstep::cli
