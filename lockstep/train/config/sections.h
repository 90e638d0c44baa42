// The steps in which a config is read. The reader collects mistakes; a wrong value stays at its
// default.
#pragma once

#include <lockstep/train/config/config.h>
#include <lockstep/train/config/json_reader.h>

namespace lockstep::train {

class Keys;

// The format has no such limits, but larger sizes are typing errors; and products of a few of these
// cannot overflow.
inline constexpr std::int64_t kMostSteps = 1'000'000'000'000;
inline constexpr std::int64_t kMostSamples = 1 << 24;
inline constexpr std::int64_t kMostTokens = 1 << 24;

// A path of the file, made absolute: from the file's folder, or the current one for --set.
class PathReader {
 public:
  PathReader(const JsonReader& reader, const ConfigSource& source)
      : reader_(reader), source_(source) {}

  std::filesystem::path absolute(const std::string& key_path, const std::string& text) const;
  // False where the key is missing or wrong.
  bool read(JsonSection& section, std::string_view key, std::filesystem::path& path) const;

 private:
  const JsonReader& reader_;
  const ConfigSource& source_;
};

// Walks through the declarations of all keys.
void describe(Keys& keys, TrainConfig& config);

// Reads what is declared.
void read_keys(JsonSection& top, const PathReader& paths, TrainConfig& config);
// Checks that keys fit together, and fills in values that follow from other names of the same keys.
void check_together(JsonReader& reader, JsonSection& top, TrainConfig& config);

// A key of DeepSpeed's that describe.cpp does not have. The row of a section stands for all its
// keys.
struct DeepSpeedKey {
  enum class Fate : std::uint8_t {
    no_effect,  // accepted with any value, and told once
    not_here,   // a mistake, unless it is switched off
    read,       // by checks.cpp: it says something that another key says here
  };
  std::string_view path;
  Fate fate;
  std::string_view words;          // why it has no effect; what to do instead; what it says
  std::string_view harmless = {};  // what else switches it off
};
std::span<const DeepSpeedKey> deepspeed_keys();
void read_deepspeed_keys(JsonSection& top);

// Checks that files to read exist, and that there is a place for those to write. Adds to the
// reader's mistakes.
void check_files(JsonReader& reader, const TrainConfig& config, NamedFiles files);

}  // namespace lockstep::train
