#include <lockstep/train/engine_config.h>

namespace lockstep {

EngineConfig::EngineConfig(train::ConfigDraft draft)
    : values_((draft.finish(), draft.config())), without_effect_(draft.without_effect()) {}

EngineConfig::EngineConfig(const std::filesystem::path& file,
                           const std::vector<std::string>& overrides)
    : EngineConfig(train::read_config(file, overrides, train::NamedFiles::checked,
                                      train::ModelOf::program)) {}

EngineConfig EngineConfig::from_json(std::string_view text) {
  return EngineConfig(train::draft_config(
      text, {.name = "the engine's config", .model_of = train::ModelOf::program}));
}

}  // namespace lockstep
