#include <lockstep/models/config.h>

#include <algorithm>

#include <lockstep/base/error.h>

namespace lockstep::models {

namespace {

// So large that nobody needs more, so small that products of them fit into 63 bits.
constexpr std::int64_t kMostRows = std::int64_t{1} << 31;   // of an embedding
constexpr std::int64_t kMostWidth = std::int64_t{1} << 20;  // of a layer
constexpr std::int64_t kMostWide = std::int64_t{1} << 24;   // of an MLP's inside
constexpr std::int64_t kMostLayers = std::int64_t{1} << 16;

void check_size(const char* name, std::int64_t value, std::int64_t most) {
  if (value < 1 || value > most)
    throw UsageError("the model's {} is {}: give a number from 1 to {}", name, value, most);
}

// Between what may be left out, 0, and the most.
void check_choice(const char* name, std::int64_t value, std::int64_t most, const char* zero) {
  if (value < 0 || value > most)
    throw UsageError("the model's {} is {}: give a number from 1 to {}, or 0 for {}", name, value,
                     most, zero);
}

constexpr std::int64_t kMultiple = 64;

ModelConfig filled(ModelConfig config) {
  if (config.num_kv_heads == 0) config.num_kv_heads = config.num_heads;
  if (config.head_dim == 0) config.head_dim = config.hidden_size / config.num_heads;
  if (config.intermediate_size == 0) {
    // Llama's MLP has three weights where GPT-2's has two: 2/3 of the width makes them as many.
    const std::int64_t wide = 4 * config.hidden_size;
    config.intermediate_size = config.family == Family::gpt2
                                   ? wide
                                   : (wide * 2 / 3 + kMultiple - 1) / kMultiple * kMultiple;
  }
  return config;
}

}  // namespace

const char* family_name(Family family) {
  switch (family) {
    case Family::gpt2: return "gpt2";
    case Family::llama: return "llama";
  }
  return "unknown";
}

void check(const ModelConfig& config) {
  check_size("vocab_size", config.vocab_size, kMostRows);
  check_size("hidden_size", config.hidden_size, kMostWidth);
  check_size("num_layers", config.num_layers, kMostLayers);
  check_size("num_heads", config.num_heads, config.hidden_size);
  check_size("max_positions", config.max_positions, kMostRows);
  check_choice("num_kv_heads", config.num_kv_heads, config.num_heads, "one for each head");
  check_choice("head_dim", config.head_dim, kMostWidth / config.num_heads,
               "hidden_size / num_heads");
  check_choice("intermediate_size", config.intermediate_size, kMostWide, "the family's default");
  if (config.head_dim == 0 && config.hidden_size % config.num_heads != 0)
    throw UsageError(
        "hidden_size {} is not a multiple of num_heads {}: the heads share the width equally",
        config.hidden_size, config.num_heads);
  const ModelConfig whole = filled(config);
  if (whole.num_heads % whole.num_kv_heads != 0)
    throw UsageError("num_heads {} is not a multiple of num_kv_heads {}: each of the latter serves "
                     "as many heads",
                     whole.num_heads, whole.num_kv_heads);
  if (!(config.norm_eps > 0 && config.norm_eps < 1))
    throw UsageError("the model's norm_eps is {}: give a small positive number, as 1e-5",
                     config.norm_eps);
  if (!(config.dropout >= 0 && config.dropout < 1))
    throw UsageError("the model's dropout is {}: give a number of at least 0 and below 1",
                     config.dropout);
  if (config.family == Family::gpt2) {
    if (whole.num_kv_heads != whole.num_heads)
      throw UsageError(
          "num_kv_heads is {} of {} heads: GPT-2 has no grouped queries; leave it out, or choose "
          "the family llama",
          whole.num_kv_heads, whole.num_heads);
    if (whole.head_dim * whole.num_heads != whole.hidden_size)
      throw UsageError("head_dim {} × num_heads {} is not hidden_size {}, as GPT-2 needs it",
                       whole.head_dim, whole.num_heads, whole.hidden_size);
  } else {
    if (whole.head_dim % 2 != 0)
      throw UsageError(
          "heads are {} wide (hidden_size {}, num_heads {}): rotary positions need an even width",
          whole.head_dim, whole.hidden_size, whole.num_heads);
    if (!(config.rope_theta > 0 && config.rope_theta < 1e18))
      throw UsageError("the model's rope_theta is {}: give a positive number, as 10000",
                       config.rope_theta);
  }
}

ModelConfig resolved(const ModelConfig& config) {
  check(config);
  return filled(config);
}

namespace {

bool can_share(const ModelConfig& c, std::int64_t ranks) {
  return c.num_heads % ranks == 0 && (c.num_kv_heads % ranks == 0 || ranks % c.num_kv_heads == 0) &&
         c.intermediate_size % ranks == 0 && c.vocab_size >= ranks;
}

// "2 or 4": the nearest numbers of ranks, below and above, that can share such a model's layers.
std::string ranks_next_to(const ModelConfig& c, std::int64_t num_ranks) {
  std::int64_t below = std::min(num_ranks, c.num_heads);
  while (!can_share(c, below)) --below;
  std::int64_t above = num_ranks;
  while (above <= c.num_heads && !can_share(c, above)) ++above;
  return above <= c.num_heads ? fmt::format("{} or {}", below, above) : fmt::format("{}", below);
}

}  // namespace

void check_tensor_ranks(const ModelConfig& config, std::int64_t num_ranks) {
  const ModelConfig c = resolved(config);
  const auto refuse = [&](const char* what, std::int64_t number, const char* otherwise) {
    throw UsageError(
        "the model's {} {} cannot be shared by {} ranks of the tensor axis: {}. Next to "
        "it, {} can",
        number, what, num_ranks, otherwise, ranks_next_to(c, num_ranks));
  };
  if (c.num_heads % num_ranks != 0)
    refuse("heads", c.num_heads, "take a number of ranks that divides the heads");
  if (c.num_kv_heads % num_ranks != 0 && num_ranks % c.num_kv_heads != 0)
    refuse("key-value heads", c.num_kv_heads,
           "take a number of ranks that divides them, or a multiple of them");
  if (c.intermediate_size % num_ranks != 0)
    refuse("units inside its MLP (intermediate_size)", c.intermediate_size,
           "take a number of ranks that divides them");
  if (c.vocab_size < num_ranks)
    refuse("tokens of vocabulary", c.vocab_size, "each rank needs one at least");
}

std::map<std::string, std::vector<std::int64_t>> parameter_shapes(const ModelConfig& config) {
  const ModelConfig c = resolved(config);
  const bool is_gpt = c.family == Family::gpt2;
  const std::int64_t hidden = c.hidden_size, inside = c.intermediate_size;
  const std::int64_t queries = c.num_heads * c.head_dim, keys = c.num_kv_heads * c.head_dim;
  std::map<std::string, std::vector<std::int64_t>> shapes;
  const auto add_layer = [&](const std::string& name, std::int64_t out, std::int64_t in) {
    shapes[name + ".weight"] = {out, in};
    if (is_gpt) shapes[name + ".bias"] = {out};
  };
  const auto add_norm = [&](const std::string& name) {
    shapes[name + ".weight"] = {hidden};
    if (is_gpt) shapes[name + ".bias"] = {hidden};
  };
  if (is_gpt) {
    shapes["transformer.wte.weight"] = {c.vocab_size, hidden};
    shapes["transformer.wpe.weight"] = {c.max_positions, hidden};
    add_norm("transformer.ln_f");
  } else {
    shapes["model.embed_tokens.weight"] = {c.vocab_size, hidden};
    add_norm("model.norm");
  }
  if (!c.tie_embeddings) shapes["lm_head.weight"] = {c.vocab_size, hidden};
  for (std::int64_t i = 0; i < c.num_layers; ++i) {
    const std::string block = fmt::format("{}.{}.", is_gpt ? "transformer.h" : "model.layers", i);
    if (is_gpt) {
      add_norm(block + "ln_1");
      add_layer(block + "attn.c_attn", queries + 2 * keys, hidden);
      add_layer(block + "attn.c_proj", hidden, queries);
      add_norm(block + "ln_2");
      add_layer(block + "mlp.c_fc", inside, hidden);
      add_layer(block + "mlp.c_proj", hidden, inside);
    } else {
      add_norm(block + "input_layernorm");
      add_layer(block + "self_attn.q_proj", queries, hidden);
      add_layer(block + "self_attn.k_proj", keys, hidden);
      add_layer(block + "self_attn.v_proj", keys, hidden);
      add_layer(block + "self_attn.o_proj", hidden, queries);
      add_norm(block + "post_attention_layernorm");
      add_layer(block + "mlp.gate_proj", inside, hidden);
      add_layer(block + "mlp.up_proj", inside, hidden);
      add_layer(block + "mlp.down_proj", hidden, inside);
    }
  }
  return shapes;
}

std::int64_t num_parameters(const ModelConfig& config) {
  return num_parameters(config,
                        {.num_layers = config.num_layers, .has_embedding = true, .has_head = true});
}

std::int64_t num_parameters(const ModelConfig& config, const ModelShare& share) {
  const ModelConfig c = resolved(config);
  check_tensor_ranks(c, share.tensor_ranks);
  const std::int64_t ranks = share.tensor_ranks;
  const std::int64_t hidden = c.hidden_size;
  const std::int64_t inside = c.intermediate_size / ranks;
  // Rows that do not divide go to the first ranks.
  const std::int64_t rows =
      c.vocab_size / ranks + (share.tensor_rank < c.vocab_size % ranks ? 1 : 0);
  const bool is_gpt = c.family == Family::gpt2;
  const std::int64_t norm = (is_gpt ? 2 : 1) * hidden;
  const std::int64_t heads = c.num_heads / ranks;
  // Fewer than ranks are held by several each.
  const std::int64_t kv_heads = std::max<std::int64_t>(1, c.num_kv_heads / ranks);
  // The biases of layers that are cut by columns are cut with them, those of the others whole.
  const std::int64_t attention = 2 * hidden * c.head_dim * (heads + kv_heads) +
                                 (is_gpt ? c.head_dim * (heads + 2 * kv_heads) + hidden : 0);
  const std::int64_t mlp = (is_gpt ? 2 : 3) * hidden * inside + (is_gpt ? inside + hidden : 0);
  std::int64_t total = share.num_layers * (attention + mlp + 2 * norm);
  if (share.has_embedding) total += (rows + (is_gpt ? c.max_positions : 0)) * hidden;
  const bool counted = c.tie_embeddings && share.has_embedding;
  if (share.has_head) total += norm + (counted ? 0 : rows * hidden);
  return total;
}

double training_flops_per_token(const ModelConfig& config, std::int64_t sequence_length) {
  const ModelConfig c = resolved(config);
  const auto hidden = static_cast<double>(c.hidden_size);
  const auto queries = static_cast<double>(c.num_heads * c.head_dim);
  const auto keys = static_cast<double>(c.num_kv_heads * c.head_dim);
  const double mlp =
      (c.family == Family::gpt2 ? 2 : 3) * hidden * static_cast<double>(c.intermediate_size);
  const double layer = 2 * hidden * (queries + keys) + mlp;
  const auto layers = static_cast<double>(c.num_layers);
  const double weights = layers * layer + hidden * static_cast<double>(c.vocab_size);
  // Scores and their product with the values: two products forward, four backward, of a multiply
  // and an add each.
  const double attention = layers * 12 * queries * static_cast<double>(sequence_length) / 2;
  return 6 * weights + attention;
}

}  // namespace lockstep::models
