// `lockstep plan`: what training takes in memory, and how a pipeline runs, before it is tried.
#include <optional>

#include <lockstep/base/error.h>
#include <lockstep/base/text.h>

#include <cli/flags.h>
#include <cli/memory_report.h>
#include <cli/plan_schedule.h>

namespace lockstep::cli {

namespace {

struct Flags {
  MemorySettings settings;
  bool json = false;
};

std::optional<Flags> parse_plan_flags(Arguments arguments) {
  CLI::App app("Tells what each rank's memory holds while a model trains: weights, gradients,\n"
               "optimizer, units in flight, activations, and the most of it at once.",
               "lockstep plan memory");
  show_usage(app, "[FLAGS] CONFIG.json, or [FLAGS] --params 7B");
  app.footer("Examples: lockstep plan memory config.json --ranks 8,64 --device-memory 80GiB\n"
             "          lockstep plan memory --params 7B --precision bf16\n"
             "docs/planning.md says what is counted and how well it agrees with what is measured.\n"
             "'lockstep plan schedule --help' tells how pipeline schedules are drawn.");
  Flags flags;
  MemorySettings& settings = flags.settings;
  app.add_option("--ranks", settings.ranks, "numbers of ranks, with commas between (1,2,4,8)");
  app.add_option("--ranks-per-host", settings.ranks_per_host,
                 "ranks that hold a copy with HYBRID_SHARD, where the config does not say (8)");
  app.add_option("--device-memory", settings.device_memory,
                 "what a rank has: 80GiB, 24GB; says what fits into it");
  app.add_option("--device", settings.device, "cpu or gpu (as the config says)");
  app.add_option("--precision", settings.precision, "fp32, bf16 or fp16 (as the config says)");
  app.add_option("--offload", settings.offload,
                 "to the host: none, optimizer, or parameters with it (as the config says)");
  app.add_option("--params", settings.parameters,
                 "a number of parameters, 7e9 or 7B, in place of a config");
  app.add_option("--set", settings.overrides,
                 "one value in place of what the config has; may be given again")
      ->type_name("KEY=VALUE")
      ->allow_extra_args(false);
  app.add_flag("--json", flags.json, "bytes as JSON, for programs");
  SplitArguments split = split_at_words(app, arguments, 2);
  if (!parse_flags(app, std::move(split.flags))) return std::nullopt;
  if (split.program.empty() || split.program.front() != "memory") {
    constexpr std::string_view kKnown[] = {"memory", "schedule"};
    throw UsageError("'lockstep plan' plans memory (lockstep plan memory CONFIG.json) and pipeline "
                     "schedules (lockstep plan schedule --stages 4 --micro-batches 8){}",
                     split.program.empty()
                         ? ""
                         : fmt::format(", and no '{}'{}", split.program.front(),
                                       did_you_mean(split.program.front(), kKnown)));
  }
  if (split.program.size() == 2) settings.config = split.program.back();
  if (settings.config.empty() == settings.parameters.empty())
    throw UsageError("{}: lockstep plan memory CONFIG.json, or lockstep plan memory --params 7B",
                     settings.config.empty()
                         ? "no config file was given"
                         : "a config and --params were given, and one is enough");
  return flags;
}

}  // namespace

int plan(Arguments arguments) {
  if (!arguments.empty() && arguments.front() == "schedule")
    return plan_schedule(arguments.subspan(1));
  const auto flags = parse_plan_flags(arguments);
  if (!flags) return 0;
  const MemoryReport report = flags->settings.config.empty() ? memory_of_parameters(flags->settings)
                                                             : memory_of_config(flags->settings);
  if (flags->json) {
    fmt::print("{}\n", to_json(report));
    return 0;
  }
  fmt::print("{}\n{}\n", report.about, plan::memory_table(report.rows));
  for (const std::string& note : report.notes) fmt::print("{}\n", note);
  return 0;
}

}  // namespace lockstep::cli
