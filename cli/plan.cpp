// `lockstep plan`: what training takes in memory, and how a pipeline runs, before it is tried.
#include <algorithm>
#include <charconv>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <spdlog/fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/error.h>
#include <lockstep/base/text.h>
#include <lockstep/launch/processes/rank_setup.h>
#include <lockstep/models/spec/family.h>
#include <lockstep/plan/model_states.h>
#include <lockstep/plan/text.h>
#include <lockstep/train/preflight/memory_fit.h>
#include <lockstep/train/preflight/run_plan.h>

#include <cli/flags.h>

namespace lockstep::cli {

int plan_schedule(Arguments arguments);  // plan_schedule.cpp

namespace {

// The values of the flags, as they were given.
struct MemorySettings {
  std::string config;
  std::vector<std::string> overrides;
  std::string ranks = "1,2,4,8";
  std::string ranks_per_host = "8";
  std::string device_memory;
  std::string device;
  std::string precision;  // where not given, the config's, or fp32
  std::string offload;    // where not given, the config's, or none
  std::string parameters;
};

// A table, and the text around it.
struct MemoryReport {
  std::string about;               // a line
  std::vector<std::string> notes;  // below it
  std::vector<plan::MemoryRow> rows;
  std::optional<std::int64_t> device_bytes;
};

using plan::MemoryRow;
using train::Fit;
using train::RunMemory;

std::vector<int> parse_ranks(const std::string& text) {
  std::vector<int> ranks;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.find(',', at), text.size());
    ranks.push_back(parse_integer(text.substr(at, end - at), "--ranks", 1, kMostRanks));
    at = end + 1;
  }
  std::ranges::sort(ranks);
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

// "7e9", "7B", "124M"
double parse_parameters(const std::string& text) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const std::string unit(end, text.data() + text.size());
  const double factor = unit.empty()                 ? 1
                        : unit == "M" || unit == "m" ? 1e6
                        : unit == "B" || unit == "b" ? 1e9
                                                     : 0;
  // A NaN is refused, too.
  if (error != std::errc() || !(number * factor >= 1 && number * factor < 1e18))
    throw UsageError("--params is '{}': it must be a number of parameters, as 7e9, 7B or 124M",
                     text);
  return number * factor;
}

plan::Offload parse_offload(const std::string& text) {
  if (text == "none") return plan::Offload::none;
  if (text == "optimizer") return plan::Offload::optimizer;
  if (text == "parameters") return plan::Offload::optimizer_and_parameters;
  throw UsageError("--offload is '{}': choose none, optimizer, or parameters (with the optimizer)",
                   text);
}

plan::Device parse_device(const std::string& text, train::DeviceChoice configured) {
  if (text == "cpu") return plan::Device::cpu;
  if (text == "gpu" || text == "cuda") return plan::Device::gpu;
  if (!text.empty()) throw UsageError("--device is '{}': choose cpu or gpu", text);
  if (configured == train::DeviceChoice::cuda) return plan::Device::gpu;
  if (configured == train::DeviceChoice::cpu) return plan::Device::cpu;
  return launch::num_visible_gpus() > 0 ? plan::Device::gpu : plan::Device::cpu;
}

const char* word_for(Fit fit) {
  switch (fit) {
    case Fit::well: return "yes";
    case Fit::tightly: return "tight";
    case Fit::not_at_all: break;
  }
  return "no";
}

void judge(MemoryReport& report) {
  if (!report.device_bytes) return;
  for (MemoryRow& row : report.rows)
    row.verdict = word_for(train::fit(row.estimate.peak, *report.device_bytes));
}

// "Into 80.0 GiB fit: FULL_SHARD on 4 or 8 ranks."
std::string what_fits(const MemoryReport& report) {
  std::string text;
  for (const StrategyTraits& one : kStrategies) {
    std::vector<int> ranks;
    for (const MemoryRow& row : report.rows)
      if (row.strategy == one.strategy && row.verdict != "no") ranks.push_back(row.num_ranks);
    if (ranks.empty()) continue;
    text += fmt::format("{}{} on {}", text.empty() ? "" : "; ", one.name, fmt::join(ranks, ", "));
  }
  const std::string there = plan::bytes_text(static_cast<double>(*report.device_bytes));
  return text.empty() ? fmt::format("Nothing here fits into {} a rank.", there)
                      : fmt::format("Into {} a rank fit, on so many ranks: {}.", there, text);
}

void note_what_stays(MemoryReport& report, plan::Offload offload) {
  std::vector<const char*> whole;
  for (const StrategyTraits& one : kStrategies)
    if (!plan::can_offload(one.strategy, offload)) whole.push_back(one.name);
  if (!whole.empty())
    report.notes.push_back(
        fmt::format("Left out {}: what is offloaded must be cut.", fmt::join(whole, ", ")));
}

// "2 sequences", or "4, 2 and 1 sequences (on 1, 2 and 4 ranks)".
std::string batch_text(const std::map<int, std::int64_t>& by_ranks) {
  const std::int64_t first = by_ranks.begin()->second;
  if (std::ranges::all_of(by_ranks, [&](const auto& one) { return one.second == first; }))
    return fmt::format("{} sequence{}", first, first == 1 ? "" : "s");
  std::vector<std::int64_t> sizes;
  std::vector<int> ranks;
  for (const auto& [count, size] : by_ranks) {
    sizes.push_back(size);
    ranks.push_back(count);
  }
  return fmt::format("{} sequences (on {} ranks)", fmt::join(sizes, ", "), fmt::join(ranks, ", "));
}

// Each strategy on each number of ranks. UsageError for what makes no sense.
MemoryReport memory_of_config(const MemorySettings& settings) {
  const auto config =
      train::load_config(settings.config, settings.overrides, train::NamedFiles::unknown);
  const plan::Device device = parse_device(settings.device, config.device);
  RunMemory memory(
      config, train::resolve_model(config), device,
      settings.precision.empty() ? config.precision.compute
                                 : plan::precision_named(settings.precision),
      settings.offload.empty() ? train::offload_of(config) : parse_offload(settings.offload));
  const int ranks_per_host =
      parse_integer(settings.ranks_per_host, "--ranks-per-host", 1, kMostRanks);
  MemoryReport report;
  if (!settings.device_memory.empty())
    report.device_bytes = plan::parse_bytes(settings.device_memory, "--device-memory");
  std::map<int, std::int64_t> micro_batches;
  std::optional<RunMemory::Choice> last;
  std::string refusal;
  for (const int ranks : parse_ranks(settings.ranks)) {
    RunMemory::Choice choice;
    try {
      choice = memory.configured(ranks, ranks_per_host);
    } catch (const UsageError& error) {
      refusal = error.what();
      report.notes.push_back(fmt::format("Left out {} ranks: {}.", ranks, error.what()));
      continue;
    }
    micro_batches[ranks] = choice.micro_batch;
    last = choice;
    for (const StrategyTraits& one : kStrategies) {
      if (!plan::can_offload(one.strategy, memory.offload())) continue;
      RunMemory::Choice row = choice;
      row.strategy = one.strategy;
      row.offload = memory.offload();
      report.rows.push_back({.num_ranks = ranks,
                             .strategy = one.strategy,
                             .estimate = memory.estimate(row),
                             .marked = one.strategy == choice.strategy});
    }
  }
  if (!last) throw UsageError("{}", refusal);
  judge(report);
  report.about =
      fmt::format("{}, {} parameters in {} units, {} on {}; micro-batches of {} of {} tokens\n",
                  models::family_named(memory.model().family).title,
                  count_text(static_cast<double>(models::num_parameters(memory.model()))),
                  memory.sizes(*last).units.size(), plan::name_of(memory.precision()),
                  device == plan::Device::cpu ? "CPUs" : "GPUs", batch_text(micro_batches),
                  config.data.sequence_length);
  if (std::ranges::any_of(report.rows, &MemoryRow::marked))
    report.notes.insert(report.notes.begin(), "* is the config's own strategy.");
  note_what_stays(report, memory.offload());
  if (!report.device_bytes) return report;
  report.notes.push_back(what_fits(report));
  if (train::fit(memory.estimate(*last).peak, *report.device_bytes) == Fit::not_at_all) {
    const auto ways = memory.ways_to_fit(*last, {.bytes = *report.device_bytes});
    if (!ways.empty())
      report.notes.push_back(fmt::format("From the config on {} rank{}, change to {}.",
                                         last->num_ranks, last->num_ranks == 1 ? "" : "s",
                                         fmt::join(ways, "; or to ")));
  }
  return report;
}

// From a number of parameters alone.
MemoryReport memory_of_parameters(const MemorySettings& settings) {
  for (const auto& [flag, given] : {std::pair("--set", !settings.overrides.empty()),
                                    std::pair("--device", !settings.device.empty())})
    if (given)
      throw UsageError("{} is for a config, and --params has none: leave it out, or give a config",
                       flag);
  const double parameters = parse_parameters(settings.parameters);
  const std::string precision = settings.precision.empty() ? "fp32" : settings.precision;
  const plan::Offload offload =
      settings.offload.empty() ? plan::Offload::none : parse_offload(settings.offload);
  const int ranks_per_host =
      parse_integer(settings.ranks_per_host, "--ranks-per-host", 1, kMostRanks);
  MemoryReport report;
  if (!settings.device_memory.empty())
    report.device_bytes = plan::parse_bytes(settings.device_memory, "--device-memory");
  for (const int ranks : parse_ranks(settings.ranks))
    for (const StrategyTraits& one : kStrategies) {
      if (!plan::can_offload(one.strategy, offload)) continue;
      const auto states = plan::estimate_memory(
          parameters / 1e9, precision,
          {.strategy = one.strategy,
           .num_ranks = one.has_copies ? std::min(ranks, ranks_per_host) : ranks,
           .offload = offload});
      const auto bytes = [](double value) { return static_cast<std::int64_t>(value); };
      report.rows.push_back({.num_ranks = ranks,
                             .strategy = one.strategy,
                             .estimate = {.weights = bytes(states.weights),
                                          .gradients = bytes(states.gradients),
                                          .optimizer = bytes(states.optimizer),
                                          .peak = bytes(states.total()),
                                          .host_optimizer = bytes(states.host)}});
    }
  judge(report);
  report.about = fmt::format("{} parameters, {}, Adam: weights, gradients and optimizer alone\n",
                             count_text(parameters), precision);
  report.notes.emplace_back(
      "Activations and units in flight come on top: a config tells how much.");
  note_what_stays(report, offload);
  if (report.device_bytes) report.notes.push_back(what_fits(report));
  return report;
}

std::string to_json(const MemoryReport& report) {
  auto rows = nlohmann::ordered_json::array();
  for (const MemoryRow& row : report.rows) {
    const plan::MemoryEstimate& one = row.estimate;
    rows.push_back({{"ranks", row.num_ranks},
                    {"strategy", name_of(row.strategy)},
                    {"weights", one.weights},
                    {"gradients", one.gradients},
                    {"optimizer", one.optimizer},
                    {"gathered", one.gathered},
                    {"gradients_on_their_way", one.gradients_on_their_way},
                    {"activations", one.activations},
                    {"step", one.step},
                    {"buffers", one.buffers},
                    {"copies", one.copies},
                    {"peak", one.peak},
                    {"host_weights", one.host_weights},
                    {"host_optimizer", one.host_optimizer},
                    {"host_copies", one.host_copies}});
    if (report.device_bytes) rows.back()["fits"] = row.verdict;
  }
  nlohmann::ordered_json all{{"unit", "bytes on each rank"}};
  if (report.device_bytes) all["device_memory"] = *report.device_bytes;
  all["estimates"] = std::move(rows);
  return all.dump(2);
}

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
