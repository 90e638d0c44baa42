#include <lockstep/train/config/names.h>
#include <lockstep/train/config/sections.h>

#include <lockstep/base/error.h>

namespace lockstep::train {

namespace {

constexpr double kMostMegabytes = 1 << 20;

void read_length(JsonSection& top, TrainConfig& config) {
  top.integer("max_steps", config.max_steps, 1, kMostSteps);
  top.integer("epochs", config.epochs, 1, kMostSteps);
  if (!config.max_steps && !config.epochs && !top.has_mistake("epochs"))
    top.missing("max_steps", "say how long to train with max_steps, epochs, or both (then "
                             "whichever ends first)");
}

void read_output(JsonSection& top, const PathReader& paths, const ConfigSource& source,
                 TrainConfig& config) {
  std::string stem = std::filesystem::path(source.name).stem().string();
  if (stem.empty() || stem == "." || stem == "..") stem = "run";
  config.output = paths.absolute("", "runs/" + stem);
  paths.read(top, "output", config.output);
}

void read_monitor(JsonSection& top, std::string_view key, const PathReader& paths,
                  MonitorSection& monitor) {
  JsonSection section = top.section(key);
  section.boolean("enabled", monitor.enabled);
  paths.read(section, "output_path", monitor.output_path);
  if (section.text("job_name", monitor.job_name) &&
      (monitor.job_name.find('/') != std::string::npos || monitor.job_name == ".."))
    section.mistake("job_name", fmt::format("is \"{}\": it must be the name of a folder, without "
                                            "'/'",
                                            monitor.job_name));
}

void read_checkpoint(JsonSection& top, const PathReader& paths, CheckpointSection& checkpoint) {
  JsonSection section = top.section("checkpoint");
  section.integer("interval", checkpoint.interval, 0, kMostSteps);
  section.integer("keep", checkpoint.keep, 1, 1'000'000);
  section.boolean("async", checkpoint.asynchronous);
  section.integer("memory_interval", checkpoint.memory_interval, 0, kMostSteps);
  const JsonNode* node = section.find("resume");
  if (node == nullptr) return;
  if (node->text() != nullptr && *node->text() == "never") {
    checkpoint.resume = Resume::never;
  } else if (paths.read(section, "resume", checkpoint.resume_from)) {
    checkpoint.resume = Resume::from;
  }
}

void read_ddp(JsonSection& top, DdpSection& ddp) {
  JsonSection section = top.section("ddp");
  const JsonSection::Range size = {.lowest = 0, .highest = kMostMegabytes, .above_lowest = true};
  section.number("first_bucket_mb", ddp.first_bucket_mb, size);
  section.number("bucket_mb", ddp.bucket_mb, size);
  section.boolean("find_unused_parameters", ddp.find_unused_parameters);
}

}  // namespace

std::filesystem::path PathReader::absolute(const std::string& key_path,
                                           const std::string& text) const {
  const bool from_flag = !key_path.empty() && !reader_.root().nearest(key_path).flag.empty();
  const std::filesystem::path folder = from_flag ? "." : source_.folder;
  return std::filesystem::absolute(folder / text).lexically_normal();
}

bool PathReader::read(JsonSection& section, std::string_view key,
                      std::filesystem::path& path) const {
  std::string text;
  if (!section.text(key, text)) return false;
  if (text.empty()) {
    section.mistake(key, "is empty: it must be a path");
    return false;
  }
  path = absolute(section.path(key), text);
  return true;
}

void read_run(JsonSection& top, const PathReader& paths, const ConfigSource& source,
              TrainConfig& config) {
  read_length(top, config);
  top.integer("seed", config.seed, 0, std::numeric_limits<std::int64_t>::max());
  top.number("gradient_clipping", config.gradient_clipping, {.lowest = 0, .highest = 1e30});
  read_output(top, paths, source, config);
  config.tensorboard.output_path = config.output / "tensorboard";
  config.csv_monitor.output_path = config.output;
  read_monitor(top, "tensorboard", paths, config.tensorboard);
  read_monitor(top, "csv_monitor", paths, config.csv_monitor);
  read_checkpoint(top, paths, config.checkpoint);
  JsonSection validation = top.section("validation");
  validation.integer("interval", config.validation.interval, 0, kMostSteps);
  validation.integer("batches", config.validation.batches, 0, kMostSteps);
  read_ddp(top, config.ddp);
  top.integer("steps_per_print", config.steps_per_print, 1, kMostSteps);
  top.boolean("wall_clock_breakdown", config.wall_clock_breakdown);
  top.boolean("dataloader_drop_last", config.dataloader_drop_last);
  top.choice("on_non_finite_loss", config.on_non_finite_loss, kOnNonFiniteLoss);
  top.choice("device", config.device, kDevices);
  top.section("communication").choice("backend", config.backend, kBackends);
  top.integer("timeout_seconds", config.timeout_seconds, 1, 7 * 24 * 3600);
  top.integer("consistency_check_interval", config.consistency_check_interval, 0, kMostSteps);
  top.integer("threads_per_rank", config.threads_per_rank, 1, 4096);
}

}  // namespace lockstep::train
