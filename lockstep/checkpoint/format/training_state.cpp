#include <lockstep/checkpoint/format/training_state.h>

#include <bit>
#include <charconv>
#include <cmath>

#include <lockstep/checkpoint/safetensors/quote.h>
#include <lockstep/checkpoint/safetensors/strict_json.h>

namespace lockstep::checkpoint {

namespace {

using nlohmann::json;

constexpr int kStateDepth = 3;

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

}  // namespace

std::string to_text(const TrainingState& state) {
  json values = json::object();
  for (const auto& [name, value] : state.values) values[name] = exact(value);
  const json root = {
      {"step", state.step},
      {"data",
       {{"epoch", state.data.epoch}, {"position", state.data.position}, {"size", state.data.size}}},
      {"seed", state.seed},
      {"samples_seen", state.samples_seen},
      {"last_loss", optional_json(state.last_loss)},
      {"values", std::move(values)},
      {"config", state.config}};
  try {
    return root.dump();
  } catch (const json::type_error&) {
    throw UsageError("the training state cannot be written: its config, or the name of a value, is "
                     "not UTF-8");
  }
}

TrainingState parse_state(std::string_view text, const std::string& file) {
  const json root = parse_strictly(text, file, kStateDepth);
  return state_at(JsonPlace(file, root));
}

TrainingState state_at(const JsonPlace& top) {
  TrainingState state;
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
  return state;
}

}  // namespace lockstep::checkpoint
