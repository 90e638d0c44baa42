#include <lockstep/models/spec/config.h>

#include <algorithm>

#include <lockstep/base/error.h>
#include <lockstep/models/spec/family.h>

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

ModelConfig filled(ModelConfig config, const Family& family) {
  if (config.num_kv_heads == 0) config.num_kv_heads = config.num_heads;
  if (config.head_dim == 0) config.head_dim = config.hidden_size / config.num_heads;
  if (config.intermediate_size == 0)
    config.intermediate_size = family.intermediate_size(config.hidden_size);
  return config;
}

void check_rotary(const ModelConfig& config) {
  if (config.head_dim % 2 != 0)
    throw UsageError(
        "heads are {} wide (hidden_size {}, num_heads {}): rotary positions need an even width",
        config.head_dim, config.hidden_size, config.num_heads);
  if (!(config.rope_theta > 0 && config.rope_theta < 1e18))
    throw UsageError("the model's rope_theta is {}: give a positive number, as 10000",
                     config.rope_theta);
}

}  // namespace

void check(const ModelConfig& config) {
  const Family& family = family_named(config.family);
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
  const ModelConfig whole = filled(config, family);
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
  if (!family.grouped_queries && whole.num_kv_heads != whole.num_heads)
    throw UsageError(
        "num_kv_heads is {} of {} heads: the family \"{}\" has no grouped queries; leave it out, "
        "or choose one that has them, {}",
        whole.num_kv_heads, whole.num_heads, family.name,
        families_that([](const Family& one) { return one.grouped_queries; }));
  if (family.rotary) check_rotary(whole);
  if (family.check) family.check(whole);
}

ModelConfig resolved(const ModelConfig& config) {
  check(config);
  return filled(config, family_named(config.family));
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

namespace {

// The name of a layer of the model, or of a block's layer where the number is that block's.
std::string numbered(const Layer& layer, std::int64_t block) {
  std::string name = layer.name;
  if (layer.in_block()) name.replace(name.find('*'), 1, std::to_string(block));
  return name;
}

// Whether `layer` is the pattern of `name`.
bool is_named(const Layer& layer, std::string_view name) {
  if (!layer.in_block()) return name == layer.name;
  const std::string_view pattern = layer.name;
  const auto star = pattern.find('*');
  const std::string_view before = pattern.substr(0, star), after = pattern.substr(star + 1);
  if (name.size() <= before.size() + after.size() || !name.starts_with(before) ||
      !name.ends_with(after))
    return false;
  name.remove_prefix(before.size());
  name.remove_suffix(after.size());
  return name.find_first_not_of("0123456789") == name.npos;
}

// How many numbers of a layer a rank of the tensor axis holds.
std::int64_t held_numbers(const Layer& layer, const ModelShare& share) {
  const std::int64_t ranks = share.tensor_ranks;
  std::int64_t out = layer.out;
  std::int64_t in = layer.kind == Layer::Kind::norm ? 1 : layer.in;
  std::int64_t bias = layer.out;
  switch (layer.cut) {
    case Layer::Cut::whole: break;
    case Layer::Cut::columns: {
      const std::int64_t width = layer.parts * layer.unit;
      // Fewer than ranks are held by several each.
      out = bias = width * std::max<std::int64_t>(1, layer.out / width / ranks);
      break;
    }
    case Layer::Cut::rows: in /= ranks; break;
    // Rows that do not divide go to the first ranks.
    case Layer::Cut::vocabulary:
      out = out / ranks + (share.tensor_rank < out % ranks ? 1 : 0);
      break;
  }
  return out * in + (layer.has_bias ? bias : 0);
}

Layer output_layer(const ModelConfig& config) {
  return {.name = "lm_head",
          .out = config.vocab_size,
          .in = config.hidden_size,
          .cut = Layer::Cut::vocabulary};
}

}  // namespace

std::vector<Layer> layers_of(const ModelConfig& config) {
  std::vector<Layer> layers = family_named(config.family).layers(config);
  if (!config.tie_embeddings) layers.push_back(output_layer(config));
  return layers;
}

std::optional<Layer> layer_of(const ModelConfig& config, std::string_view parameter) {
  const auto is_of = [&](const Layer& layer, std::string_view end) {
    return parameter.ends_with(end) &&
           is_named(layer, parameter.substr(0, parameter.size() - end.size()));
  };
  for (const Layer& layer : layers_of(config))
    if (is_of(layer, ".weight") || (layer.has_bias && is_of(layer, ".bias"))) return layer;
  return std::nullopt;
}

std::map<std::string, std::vector<std::int64_t>> parameter_shapes(const ModelConfig& config) {
  std::map<std::string, std::vector<std::int64_t>> shapes;
  for (const Layer& layer : layers_of(resolved(config))) {
    const std::int64_t count = layer.in_block() ? config.num_layers : 1;
    for (std::int64_t block = 0; block < count; ++block) {
      const std::string name = numbered(layer, block);
      if (layer.kind == Layer::Kind::norm)
        shapes[name + ".weight"] = {layer.out};
      else
        shapes[name + ".weight"] = {layer.out, layer.in};
      if (layer.has_bias) shapes[name + ".bias"] = {layer.out};
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
  std::int64_t total = 0;
  for (const Layer& layer : family_named(c.family).layers(c)) {
    const std::int64_t held = held_numbers(layer, share);
    if (layer.in_block())
      total += share.num_layers * held;
    else if (layer.kind == Layer::Kind::embedding ? share.has_embedding : share.has_head)
      total += held;
  }
  const bool counted = c.tie_embeddings && share.has_embedding;
  if (share.has_head && !counted) total += held_numbers(output_layer(c), share);
  return total;
}

double training_flops_per_token(const ModelConfig& config, std::int64_t sequence_length) {
  const ModelConfig c = resolved(config);
  const auto hidden = static_cast<double>(c.hidden_size);
  double block = 0;
  for (const Layer& layer : family_named(c.family).layers(c))
    if (layer.in_block() && layer.kind == Layer::Kind::linear)
      block += static_cast<double>(layer.out) * static_cast<double>(layer.in);
  const auto layers = static_cast<double>(c.num_layers);
  const double weights = layers * block + hidden * static_cast<double>(c.vocab_size);
  // Scores and their product with the values: two products forward, four backward, of a multiply
  // and an add each.
  const double attention = layers * 12 * static_cast<double>(c.num_heads * c.head_dim) *
                           static_cast<double>(sequence_length) / 2;
  return 6 * weights + attention;
}

}  // namespace lockstep::models
