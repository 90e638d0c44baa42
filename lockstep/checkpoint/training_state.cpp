#include <lockstep/checkpoint/training_state.h>

#include <bit>
#include <charconv>
#include <cmath>

#include <lockstep/base/crc32c.h>
#include <lockstep/base/mapped_file.h>
#include <lockstep/checkpoint/folder.h>
#include <lockstep/checkpoint/safetensors/quote.h>
#include <lockstep/checkpoint/safetensors/strict_json.h>

namespace lockstep::checkpoint {

namespace {

using nlohmann::json;

constexpr const char* kFormat = "lockstep-checkpoint";
constexpr int kVersion = 1;
constexpr int kDepth = 3;
constexpr std::uint64_t kLargestState = 64 << 20;

// Numbers are written with as many digits as bring them back; infinities and NaNs, which JSON does
// not have, as their bits.
json exact(double value) {
  if (std::isfinite(value)) return value;
  return fmt::format("{:016x}", std::bit_cast<std::uint64_t>(value));
}

double read_exact(const JsonPlace& place, const json& value) {
  if (value.is_number()) return value.get<double>();
  const std::string& digits = place.text();
  std::uint64_t bits = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), bits, 16);
  const auto number = std::bit_cast<double>(bits);
  if (error != std::errc() || end != digits.data() + digits.size() || digits.size() != 16 ||
      std::isfinite(number))
    place.fail(fmt::format("{} is not a number", quote(digits)));
  return number;
}

json optional_json(const std::optional<double>& value) {
  return value ? exact(*value) : json(nullptr);
}

std::optional<double> read_optional(const JsonPlace& top, const char* key) {
  const JsonPlace place = top.at(key);
  const json& value = top.object()[key];
  if (value.is_null()) return std::nullopt;
  return read_exact(place, value);
}

FileRecord record_of(const std::filesystem::path& path) {
  const MappedFile file(path);
  return {file.size(), crc32c(file.bytes())};
}

}  // namespace

std::string to_text(const StateFile& file) {
  const TrainingState& state = file.state;
  json values = json::object();
  for (const auto& [name, value] : state.values) values[name] = exact(value);
  json files = json::object();
  for (const auto& [name, record] : file.files)
    files[name] = {{"bytes", record.bytes}, {"crc32c", record.crc32c}};
  const json root = {
      {"format", kFormat},
      {"version", kVersion},
      {"step", state.step},
      {"data",
       {{"epoch", state.data.epoch}, {"position", state.data.position}, {"size", state.data.size}}},
      {"seed", state.seed},
      {"samples_seen", state.samples_seen},
      {"last_loss", optional_json(state.last_loss)},
      {"values", std::move(values)},
      {"config", state.config},
      {"files", std::move(files)}};
  try {
    return root.dump(1) + '\n';
  } catch (const json::type_error&) {
    throw UsageError("the training state cannot be written: its config, or the name of a value or "
                     "of a file, is not UTF-8");
  }
}

StateFile parse_state(std::string_view text, const std::string& file) {
  const json root = parse_strictly(text, file, kDepth);
  const JsonPlace top(file, root);
  if (top.at("format").text() != kFormat)
    top.at("format").fail("this is not the state of a Lockstep checkpoint");
  if (const auto version = top.at("version").integer<int>(); version != kVersion)
    top.at("version").fail(fmt::format("it is of version {}, and this program reads version {}: "
                                       "use the program that wrote it",
                                       version, kVersion));
  StateFile result;
  TrainingState& state = result.state;
  state.step = top.at("step").integer<std::int64_t>(0);
  state.data.epoch = top.at("data").at("epoch").integer<std::int64_t>(0);
  state.data.position = top.at("data").at("position").integer<std::int64_t>(0);
  state.data.size = top.at("data").at("size").integer<std::int64_t>(0);
  state.seed = top.at("seed").integer<std::uint64_t>();
  state.samples_seen = top.at("samples_seen").integer<std::int64_t>(0);
  state.last_loss = read_optional(top, "last_loss");
  const JsonPlace values = top.at("values");
  for (const auto& [name, value] : values.object().items())
    state.values[name] = read_exact(values.at(name), value);
  state.config = top.at("config").text();
  const JsonPlace files = top.at("files");
  for (const auto& item : files.object().items()) {
    const JsonPlace place = files.at(item.key());
    result.files[item.key()] = {place.at("bytes").integer<std::uint64_t>(),
                                place.at("crc32c").integer<std::uint32_t>()};
  }
  return result;
}

StateFile read_state(const std::filesystem::path& path) {
  return parse_state(read_text(path, kLargestState), fmt::format("state '{}'", path.string()));
}

FileRecords record_files(const std::filesystem::path& folder) {
  FileRecords records;
  std::error_code error;
  for (auto it = std::filesystem::directory_iterator(folder, error);
       !error && it != std::filesystem::directory_iterator(); it.increment(error))
    if (it->is_regular_file(error) && it->path().filename() != kStateFile)
      records[it->path().filename().string()] = record_of(it->path());
  if (error) throw UsageError("cannot read '{}': {}", folder.string(), error.message());
  return records;
}

void verify_files(const std::filesystem::path& folder, const FileRecords& files) {
  std::string wrong;
  std::error_code ignored;
  for (const auto& [name, record] : files) {
    // A name from a file: nothing outside of the folder is looked at.
    const bool here = std::filesystem::path(name).filename() == name &&
                      std::filesystem::is_regular_file(folder / name, ignored);
    if (!here) {
      wrong += fmt::format("; {} is missing", quote(name));
      continue;
    }
    const FileRecord found = record_of(folder / name);
    if (found.bytes != record.bytes)
      wrong += fmt::format("; {} has {} bytes, and had {}", quote(name), found.bytes, record.bytes);
    else if (found.crc32c != record.crc32c)
      wrong += fmt::format("; {} has the checksum {:08x}, and had {:08x}", quote(name),
                           found.crc32c, record.crc32c);
  }
  if (wrong.empty()) return;
  throw UsageError("the checkpoint '{}' is not as it was written{}. It is damaged or was changed: "
                   "use an older one, or a copy",
                   folder.string(), wrong);
}

}  // namespace lockstep::checkpoint
