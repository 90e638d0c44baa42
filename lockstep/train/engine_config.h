// A config of `lockstep train`, without what describes a model, its data and its loop: how a
// program's own model is trained (docs/engine.md).
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/train/config/config.h>

namespace lockstep {

// A config, read and checked. UsageError naming every mistake, each with its line.
class EngineConfig {
 public:
  EngineConfig(const std::filesystem::path& file,  // NOLINT(google-explicit-constructor)
               const std::vector<std::string>& overrides = {});
  EngineConfig(const std::string& file)  // NOLINT(google-explicit-constructor)
      : EngineConfig(std::filesystem::path(file)) {}
  EngineConfig(const char* file)  // NOLINT(google-explicit-constructor)
      : EngineConfig(std::filesystem::path(file)) {}
  // The config itself, as JSON.
  static EngineConfig from_json(std::string_view text);

  const train::TrainConfig& values() const { return values_; }
  // The keys that are there and have no effect on an engine.
  const std::vector<std::string>& without_effect() const { return without_effect_; }

 private:
  explicit EngineConfig(train::ConfigDraft draft);

  train::TrainConfig values_;
  std::vector<std::string> without_effect_;
};

}  // namespace lockstep

namespace lockstep::names {

using lockstep::EngineConfig;

}  // namespace lockstep::names
