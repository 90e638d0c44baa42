#include <lockstep/models/hugging_face.h>

#include <nlohmann/json.hpp>

#include <lockstep/base/error.h>

namespace lockstep::models {

namespace {

using nlohmann::json;

// The keys of one JSON object, each read with its type checked. A key that is null counts as left
// out.
class Keys {
 public:
  Keys(const json& object, std::string file) : object_(object), file_(std::move(file)) {}

  const json* find(const char* key) const {
    const auto at = object_.find(key);
    return at == object_.end() || at->is_null() ? nullptr : &*at;
  }

  std::int64_t whole(const char* key, std::int64_t fallback) const {
    const json* value = find(key);
    if (value == nullptr) return fallback;
    // 64 unsigned bits do not fit, and would come out negative.
    if (!value->is_number_integer() ||
        (value->is_number_unsigned() && value->get<std::uint64_t>() > (std::uint64_t{1} << 62)))
      refuse(key, "a whole number is needed");
    return value->get<std::int64_t>();
  }

  double number(const char* key, double fallback) const {
    const json* value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_number()) refuse(key, "a number is needed");
    return value->get<double>();
  }

  bool flag(const char* key, bool fallback) const {
    const json* value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_boolean()) refuse(key, "true or false is needed");
    return value->get<bool>();
  }

  std::string text(const char* key, const char* fallback) const {
    const json* value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_string()) refuse(key, "a text is needed");
    return value->get<std::string>();
  }

  // A setting of which only one value is supported.
  void need(const char* key, bool supported) const {
    if (flag(key, supported) != supported)
      refuse(key, fmt::format("only {} is supported", supported));
  }

  [[noreturn]] void refuse(const char* key, const std::string& why) const {
    const json* value = find(key);
    throw UsageError("{}: {} is {}: {}", file_, key, value == nullptr ? "missing" : shown(*value),
                     why);
  }

 private:
  // Whatever the file holds, a message stays readable: short, and valid UTF-8.
  static std::string shown(const json& value) {
    constexpr std::size_t kLongest = 200;
    std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true, json::error_handler_t::replace);
    if (text.size() > kLongest) text = text.substr(0, kLongest) + "…";
    return text;
  }

  const json& object_;
  std::string file_;
};

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

Activation gpt2_activation(const Keys& keys) {
  const std::string name = keys.text("activation_function", "gelu_new");
  if (name == "gelu_new" || name == "gelu_pytorch_tanh") return Activation::gelu_tanh;
  if (name != "gelu")
    keys.refuse("activation_function", "gelu_new, gelu_pytorch_tanh and gelu are "
                                       "supported");
  return Activation::gelu_erf;
}

ModelConfig read_gpt2(const Keys& keys) {
  keys.need("scale_attn_weights", true);
  keys.need("scale_attn_by_inverse_layer_idx", false);
  keys.need("add_cross_attention", false);
  return {.family = Family::gpt2,
          .vocab_size = keys.whole("vocab_size", 50257),
          .hidden_size = keys.whole("n_embd", 768),
          .num_layers = keys.whole("n_layer", 12),
          .num_heads = keys.whole("n_head", 12),
          .intermediate_size = keys.whole("n_inner", 0),
          .max_positions = keys.whole("n_positions", 1024),
          .norm_eps = keys.number("layer_norm_epsilon", 1e-5),
          .activation = gpt2_activation(keys),
          .tie_embeddings = keys.flag("tie_word_embeddings", true)};
}

// Newer files say all of it in rope_parameters, older ones in two keys.
double read_rope_theta(const Keys& keys, const std::string& file) {
  double theta = keys.number("rope_theta", 10000.0);
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const json* value = keys.find(key);
    if (value == nullptr) continue;
    if (!value->is_object()) keys.refuse(key, "an object is needed");
    const Keys rope(*value, fmt::format("{}: {}", file, key));
    if (rope.text("rope_type", rope.text("type", "default").c_str()) != "default")
      keys.refuse(key, "only rotary positions of the type \"default\" are supported");
    theta = rope.number("rope_theta", theta);
    if (rope.number("partial_rotary_factor", 1.0) != 1.0)
      rope.refuse("partial_rotary_factor", "only 1 is supported");
  }
  return theta;
}

ModelConfig read_llama(const Keys& keys, const std::string& file) {
  if (keys.text("hidden_act", "silu") != "silu") keys.refuse("hidden_act", "silu is supported");
  keys.need("attention_bias", false);
  keys.need("mlp_bias", false);
  if (keys.number("partial_rotary_factor", 1.0) != 1.0)
    keys.refuse("partial_rotary_factor", "only 1 is supported");
  return {.family = Family::llama,
          .vocab_size = keys.whole("vocab_size", 32000),
          .hidden_size = keys.whole("hidden_size", 4096),
          .num_layers = keys.whole("num_hidden_layers", 32),
          .num_heads = keys.whole("num_attention_heads", 32),
          .num_kv_heads = keys.whole("num_key_value_heads", 0),
          .head_dim = keys.whole("head_dim", 0),
          .intermediate_size = keys.whole("intermediate_size", 11008),
          .max_positions = keys.whole("max_position_embeddings", 2048),
          .norm_eps = keys.number("rms_norm_eps", 1e-6),
          .rope_theta = read_rope_theta(keys, file),
          .tie_embeddings = keys.flag("tie_word_embeddings", false)};
}

bool is_layer_weight_of_gpt2(std::string_view name) {
  for (const char* end :
       {".attn.c_attn.weight", ".attn.c_proj.weight", ".mlp.c_fc.weight", ".mlp.c_proj.weight"})
    if (name.ends_with(end)) return true;
  return false;
}

}  // namespace

ModelConfig from_hugging_face(std::string_view json_text, std::string_view file) {
  const std::string name(file);
  const json object = parse(json_text, file);
  const Keys keys(object, name);
  if (keys.find("quantization_config") != nullptr)
    keys.refuse("quantization_config", "quantised weights are not supported");
  const std::string type = keys.text("model_type", "");
  if (type != "gpt2" && type != "llama")
    keys.refuse("model_type", "\"gpt2\" and \"llama\" are supported");
  const ModelConfig config = type == "gpt2" ? read_gpt2(keys) : read_llama(keys, name);
  try {
    return resolved(config);
  } catch (const UsageError& error) {
    throw UsageError("{}: {}", file, error.what());
  }
}

std::string to_hugging_face(const ModelConfig& config) {
  const ModelConfig c = resolved(config);
  // Tokens that begin or end a text are the tokenizer's to say.
  nlohmann::ordered_json object = {{"model_type", family_name(c.family)},
                                   {"vocab_size", c.vocab_size},
                                   {"tie_word_embeddings", c.tie_embeddings},
                                   {"bos_token_id", nullptr},
                                   {"eos_token_id", nullptr}};
  if (c.family == Family::gpt2) {
    object.update(
        {{"architectures", {"GPT2LMHeadModel"}},
         {"n_embd", c.hidden_size},
         {"n_layer", c.num_layers},
         {"n_head", c.num_heads},
         {"n_inner", c.intermediate_size},
         {"n_positions", c.max_positions},
         {"activation_function", c.activation == Activation::gelu_tanh ? "gelu_new" : "gelu"},
         {"layer_norm_epsilon", c.norm_eps},
         {"embd_pdrop", c.dropout},
         {"resid_pdrop", c.dropout},
         {"attn_pdrop", 0.0}});
  } else {
    object.update({{"architectures", {"LlamaForCausalLM"}},
                   {"hidden_size", c.hidden_size},
                   {"intermediate_size", c.intermediate_size},
                   {"num_hidden_layers", c.num_layers},
                   {"num_attention_heads", c.num_heads},
                   {"num_key_value_heads", c.num_kv_heads},
                   {"head_dim", c.head_dim},
                   {"hidden_act", "silu"},
                   {"rms_norm_eps", c.norm_eps},
                   {"max_position_embeddings", c.max_positions},
                   {"attention_bias", false},
                   {"mlp_bias", false},
                   // Transformers before version 5 reads the first, later ones the second.
                   {"rope_theta", c.rope_theta},
                   {"rope_parameters", {{"rope_type", "default"}, {"rope_theta", c.rope_theta}}}});
  }
  return object.dump(2) + "\n";
}

std::optional<std::string> parameter_of(const ModelConfig& config, std::string_view file_name) {
  const bool gpt2 = config.family == Family::gpt2;
  if (file_name.ends_with(".attn.bias") || file_name.ends_with(".attn.masked_bias") ||
      file_name.ends_with("rotary_emb.inv_freq"))
    return std::nullopt;
  if (file_name == "lm_head.weight")
    return config.tie_embeddings ? std::nullopt : std::optional<std::string>(file_name);
  const std::string root = gpt2 ? "transformer." : "model.";
  return file_name.starts_with(root) ? std::string(file_name) : root + std::string(file_name);
}

std::string file_name_of(std::string_view parameter) { return std::string(parameter); }

bool stored_transposed(const ModelConfig& config, std::string_view parameter) {
  return config.family == Family::gpt2 && is_layer_weight_of_gpt2(parameter);
}

}  // namespace lockstep::models
