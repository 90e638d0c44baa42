#include <lockstep/base/error.h>
#include <lockstep/base/mapped_file.h>
#include <lockstep/train/config/batch.h>
#include <lockstep/train/config/sections.h>

namespace lockstep::train {

namespace {

void check_batch(JsonReader& reader, JsonSection& top, const BatchSection& batch) {
  for (const std::string_view key : {"train_batch_size", "train_micro_batch_size_per_gpu",
                                     "gradient_accumulation_steps", "elasticity"})
    if (top.has_mistake(key)) return;
  if (!batch.global && !batch.micro)
    top.missing(
        "train_batch_size",
        "set it to the samples of a step on all ranks, or train_micro_batch_size_per_gpu to "
        "those of one forward pass on one rank, or both");
  else if (const std::string wrong = batch_contradiction(batch); !wrong.empty())
    reader.mistake_about("train_batch_size", wrong);
}

TrainConfig read_sections(JsonReader& reader, const ConfigSource& source) {
  const PathReader paths(reader, source);
  JsonSection top = reader.top();
  TrainConfig config;
  read_run(top, paths, source, config);
  read_data(top, paths, config.data);
  read_model(top, paths, config.data, config.model);
  read_batch(top, config.batch);
  read_optimizer(top, config.optimizer);
  read_scheduler(top, config);
  read_parallel(top, paths, config.parallel);
  read_elasticity(top, config.parallel, config);
  read_sharding(top, config.sharding);
  read_precision(top, config.sharding.strategy, config.precision);
  read_recompute(top, config.recomputed_blocks);
  read_deepspeed_keys(top);
  if (!config.elasticity) check_batch(reader, top, config.batch);
  return config;
}

// "zero_optimization": true, which was DeepSpeed's stage 1 before there were stages.
void read_old_switch(JsonNode& root) {
  auto* const keys = std::get_if<JsonObject>(&root.value);
  if (keys == nullptr) return;
  for (JsonMember& one : *keys) {
    const bool* const on = std::get_if<bool>(&one.node.value);
    if (one.key != "zero_optimization" || on == nullptr) continue;
    JsonNode stage{
        .value = std::int64_t{*on ? 1 : 0}, .line = one.node.line, .flag = one.node.flag};
    one.node.value = JsonObject{{"stage", std::move(stage)}};
  }
}

ConfigDraft draft_of(std::string_view text, const ConfigSource& source, NamedFiles files) {
  JsonNode root = parse_json(text, source.name);
  std::vector<std::pair<std::string, std::string>> refused;
  for (const std::string& assignment : source.overrides) {
    try {
      apply_override(root, assignment);
    } catch (const UsageError& error) {
      refused.emplace_back(assignment, error.what());
    }
  }
  read_old_switch(root);
  auto reader = std::make_unique<JsonReader>(std::move(root), source.name);
  // The first time only tells which keys there are.
  read_sections(*reader, source);
  reader->start_over();
  for (const auto& [assignment, what] : refused) reader->mistake_of_flag(assignment, what);
  TrainConfig config = read_sections(*reader, source);
  if (files != NamedFiles::unknown) check_files(*reader, config, files);
  return {std::move(config), std::move(reader)};
}

}  // namespace

ConfigDraft::ConfigDraft(TrainConfig config)
    : ConfigDraft(std::move(config),
                  std::make_unique<JsonReader>(JsonNode{.value = JsonObject{}}, "")) {}
ConfigDraft::ConfigDraft(TrainConfig config, std::unique_ptr<JsonReader> reader)
    : config_(std::move(config)), reader_(std::move(reader)) {}
ConfigDraft::ConfigDraft(ConfigDraft&&) noexcept = default;
ConfigDraft& ConfigDraft::operator=(ConfigDraft&&) noexcept = default;
ConfigDraft::~ConfigDraft() = default;

bool ConfigDraft::check(std::span<const std::string_view> keys,
                        const std::function<void()>& check) {
  for (const std::string_view key : keys)
    if (reader_->has_mistake(key)) return false;
  try {
    check();
    return true;
  } catch (const UsageError& error) {
    reader_->misfit(keys.front(), error.what());
    return false;
  }
}

bool ConfigDraft::has_mistakes() const { return reader_->has_mistakes(); }
const std::vector<std::string>& ConfigDraft::without_effect() const {
  return reader_->without_effect();
}
void ConfigDraft::finish() { reader_->finish(); }

ConfigDraft draft_config(std::string_view text, const ConfigSource& source) {
  return draft_of(text, source, NamedFiles::unknown);
}

TrainConfig parse_config(std::string_view text, const ConfigSource& source) {
  ConfigDraft draft = draft_config(text, source);
  draft.finish();
  return draft.config();
}

TrainConfig load_config(const std::filesystem::path& path,
                        const std::vector<std::string>& overrides, NamedFiles files) {
  ConfigDraft draft = read_config(path, overrides, files);
  draft.finish();
  return draft.config();
}

ConfigDraft read_config(const std::filesystem::path& path,
                        const std::vector<std::string>& overrides, NamedFiles files) {
  std::error_code unknown;
  const auto kind = std::filesystem::status(path, unknown).type();
  using Kind = std::filesystem::file_type;
  if (kind != Kind::regular && kind != Kind::not_found && !unknown)
    throw UsageError("'{}' is {}, and a config file is wanted: a JSON file as docs/config.md "
                     "explains it",
                     path.string(), kind == Kind::directory ? "a folder" : "no plain file");
  const MappedFile file(path);
  const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()), file.size());
  return draft_of(
      text, {.name = path.string(), .folder = path.parent_path(), .overrides = overrides}, files);
}

}  // namespace lockstep::train
