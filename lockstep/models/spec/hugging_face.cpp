#include <lockstep/models/spec/hugging_face.h>

#include <algorithm>

#include <nlohmann/json.hpp>

#include <lockstep/base/error.h>
#include <lockstep/models/spec/family.h>

namespace lockstep::models {

namespace {

using nlohmann::json;

// Whatever the file holds, a message stays readable: short, and valid UTF-8.
std::string shown(const json& value) {
  constexpr std::size_t kLongest = 200;
  std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true, json::error_handler_t::replace);
  if (text.size() > kLongest) text = text.substr(0, kLongest) + "…";
  return text;
}

json parse(std::string_view text, std::string_view file) {
  // Deeper than any config.json; the parser's own stack has no bound.
  constexpr int kDeepest = 16;
  const auto depth_checked = [&](int depth, json::parse_event_t, json&) {
    if (depth > kDeepest)
      throw UsageError("{} is no model's config.json: it nests deeper than {} levels", file,
                       kDeepest);
    return true;
  };
  json object;
  try {
    object = json::parse(text, depth_checked);
  } catch (const json::exception& error) {
    throw UsageError("{} is no valid JSON: {}", file, error.what());
  }
  if (!object.is_object())
    throw UsageError("{} is no model's config.json: it holds no JSON object", file);
  return object;
}

// Newer files say all of it in rope_parameters, older ones in two keys.
double read_rope_theta(const ConfigKeys& keys, double by_default) {
  double theta = keys.number("rope_theta", by_default);
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const json* value = keys.find(key);
    if (value == nullptr) continue;
    if (!value->is_object()) keys.refuse(key, "an object is needed");
    const ConfigKeys rope(*value, fmt::format("{}: {}", keys.file(), key));
    if (rope.text("rope_type", rope.text("type", "default").c_str()) != "default")
      keys.refuse(key, "only rotary positions of the type \"default\" are supported");
    theta = rope.number("rope_theta", theta);
    rope.need("partial_rotary_factor", 1.0);
  }
  return theta;
}

}  // namespace

const json* ConfigKeys::find(const char* key) const {
  const auto at = object_.find(key);
  return at == object_.end() || at->is_null() ? nullptr : &*at;
}

std::int64_t ConfigKeys::whole(const char* key, std::int64_t fallback) const {
  const json* value = find(key);
  if (value == nullptr) return fallback;
  // 64 unsigned bits do not fit, and would come out negative.
  if (!value->is_number_integer() ||
      (value->is_number_unsigned() && value->get<std::uint64_t>() > (std::uint64_t{1} << 62)))
    refuse(key, "a whole number is needed");
  return value->get<std::int64_t>();
}

double ConfigKeys::number(const char* key, double fallback) const {
  const json* value = find(key);
  if (value == nullptr) return fallback;
  if (!value->is_number()) refuse(key, "a number is needed");
  return value->get<double>();
}

bool ConfigKeys::flag(const char* key, bool fallback) const {
  const json* value = find(key);
  if (value == nullptr) return fallback;
  if (!value->is_boolean()) refuse(key, "true or false is needed");
  return value->get<bool>();
}

std::string ConfigKeys::text(const char* key, const char* fallback) const {
  const json* value = find(key);
  if (value == nullptr) return fallback;
  if (!value->is_string()) refuse(key, "a text is needed");
  return value->get<std::string>();
}

void ConfigKeys::need(const char* key, bool supported) const {
  if (flag(key, supported) != supported)
    refuse(key, fmt::format("only {} is supported", supported));
}

void ConfigKeys::need(const char* key, double supported) const {
  if (number(key, supported) != supported)
    refuse(key, fmt::format("only {} is supported", supported));
}

void ConfigKeys::refuse(const char* key, const std::string& why) const {
  const json* value = find(key);
  throw UsageError("{}: {} is {}: {}", file_, key, value == nullptr ? "missing" : shown(*value),
                   why);
}

ModelConfig read_decoder_keys(const ConfigKeys& keys, const ModelConfig& by_default) {
  if (keys.text("hidden_act", "silu") != "silu") keys.refuse("hidden_act", "silu is supported");
  keys.need("partial_rotary_factor", 1.0);
  return {.vocab_size = keys.whole("vocab_size", by_default.vocab_size),
          .hidden_size = keys.whole("hidden_size", by_default.hidden_size),
          .num_layers = keys.whole("num_hidden_layers", by_default.num_layers),
          .num_heads = keys.whole("num_attention_heads", by_default.num_heads),
          .num_kv_heads = keys.whole("num_key_value_heads", by_default.num_kv_heads),
          .head_dim = keys.whole("head_dim", by_default.head_dim),
          .intermediate_size = keys.whole("intermediate_size", by_default.intermediate_size),
          .max_positions = keys.whole("max_position_embeddings", by_default.max_positions),
          .norm_eps = keys.number("rms_norm_eps", by_default.norm_eps),
          .rope_theta = read_rope_theta(keys, by_default.rope_theta),
          .tie_embeddings = keys.flag("tie_word_embeddings", by_default.tie_embeddings)};
}

void write_decoder_keys(const ModelConfig& config, nlohmann::ordered_json& object) {
  object.update(
      {{"hidden_size", config.hidden_size},
       {"intermediate_size", config.intermediate_size},
       {"num_hidden_layers", config.num_layers},
       {"num_attention_heads", config.num_heads},
       {"num_key_value_heads", config.num_kv_heads},
       {"head_dim", config.head_dim},
       {"hidden_act", "silu"},
       {"rms_norm_eps", config.norm_eps},
       {"max_position_embeddings", config.max_positions},
       // Transformers before version 5 reads the first, later ones the second.
       {"rope_theta", config.rope_theta},
       {"rope_parameters", {{"rope_type", "default"}, {"rope_theta", config.rope_theta}}}});
}

ModelConfig from_hugging_face(std::string_view json_text, std::string_view file) {
  const json object = parse(json_text, file);
  const ConfigKeys keys(object, std::string(file));
  if (keys.find("quantization_config") != nullptr)
    keys.refuse("quantization_config", "quantised weights are not supported");
  const std::string type = keys.text("model_type", "");
  const std::vector<std::string> known = family_names();
  if (std::ranges::find(known, type) == known.end())
    keys.refuse("model_type",
                fmt::format("it has to be {}", families_that([](const Family&) { return true; })));
  ModelConfig config = family_named(type).read(keys);
  config.family = type;
  try {
    return resolved(config);
  } catch (const UsageError& error) {
    throw UsageError("{}: {}", file, error.what());
  }
}

std::string to_hugging_face(const ModelConfig& config) {
  const ModelConfig c = resolved(config);
  // Tokens that begin or end a text are the tokenizer's to say.
  nlohmann::ordered_json object = {{"model_type", c.family},
                                   {"vocab_size", c.vocab_size},
                                   {"tie_word_embeddings", c.tie_embeddings},
                                   {"bos_token_id", nullptr},
                                   {"eos_token_id", nullptr}};
  family_named(c.family).write(c, object);
  return object.dump(2) + "\n";
}

std::optional<std::string> parameter_of(const ModelConfig& config, std::string_view file_name) {
  const Family& family = family_named(config.family);
  for (const std::string& buffer : family.buffers)
    if (file_name.ends_with(buffer)) return std::nullopt;
  if (file_name == "lm_head.weight")
    return config.tie_embeddings ? std::nullopt : std::optional<std::string>(file_name);
  const std::string first = family.layers(config).front().name;
  const std::string root = first.substr(0, first.find('.') + 1);
  return file_name.starts_with(root) ? std::string(file_name) : root + std::string(file_name);
}

std::string file_name_of(std::string_view parameter) { return std::string(parameter); }

bool stored_transposed(const ModelConfig& config, std::string_view parameter) {
  const auto layer = layer_of(config, parameter);
  return layer && layer->stored_transposed && parameter.ends_with(".weight");
}

}  // namespace lockstep::models
