#include <lockstep/base/error.h>
#include <lockstep/base/file.h>
#include <lockstep/train/config/batch.h>
#include <lockstep/train/config/sections.h>

namespace lockstep::train {

namespace {

TrainConfig read_sections(JsonReader& reader, const ConfigSource& source) {
  const PathReader paths(reader, source);
  JsonSection top = reader.top();
  TrainConfig config;
  config.model_of = source.model_of;
  if (source.model_of == ModelOf::config && top.section("model").find("library") != nullptr)
    config.model_of = ModelOf::library;
  std::string stem = std::filesystem::path(source.name).stem().string();
  if (stem.empty() || stem == "." || stem == "..") stem = "run";
  if (source.model_of != ModelOf::program)
    config.output = paths.absolute("", "runs/" + stem);
  else
    // A program says itself when to save, and which of its checkpoints it no longer needs.
    config.checkpoint = {.interval = 0, .keep = 0, .asynchronous = false};
  read_keys(top, paths, config);
  check_together(reader, top, config);
  read_deepspeed_keys(top);
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
                        const std::vector<std::string>& overrides, NamedFiles files,
                        ModelOf model_of) {
  std::error_code unknown;
  const auto kind = std::filesystem::status(path, unknown).type();
  using Kind = std::filesystem::file_type;
  if (kind != Kind::regular && kind != Kind::not_found && !unknown)
    throw UsageError("'{}' is {}, and a config file is wanted: a JSON file as docs/config.md "
                     "explains it",
                     path.string(), kind == Kind::directory ? "a folder" : "no plain file");
  const MappedFile file(path);
  const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()), file.size());
  return draft_of(text,
                  {.name = path.string(),
                   .folder = path.parent_path(),
                   .overrides = overrides,
                   .model_of = model_of},
                  files);
}

}  // namespace lockstep::train
