#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/models/initial_weights.h>
#include <lockstep/models/llama/llama.h>
#include <lockstep/models/make_model.h>
#include <lockstep/nn/layers/random.h>
#include <lockstep/recompute/keep_results.h>
#include <lockstep/recompute/wrap_activation_checkpointing.h>

#include "../base/errors.h"
#include "configs.h"

namespace lockstep::models {
namespace {

std::set<std::string> names_of(const LanguageModel& model) {
  const auto keys = model.named_parameters().keys();
  return {keys.begin(), keys.end()};
}

TEST(LanguageModel, HasHuggingFacesNamesAndShapes) {
  auto config = small_gpt();
  config.num_layers = 1;
  const auto gpt = make_model(config, 1);
  const std::string h = "transformer.h.0.";
  EXPECT_EQ(
      names_of(*gpt),
      (std::set<std::string>{"transformer.wte.weight", "transformer.wpe.weight", h + "ln_1.weight",
                             h + "ln_1.bias", h + "attn.c_attn.weight", h + "attn.c_attn.bias",
                             h + "attn.c_proj.weight", h + "attn.c_proj.bias", h + "ln_2.weight",
                             h + "ln_2.bias", h + "mlp.c_fc.weight", h + "mlp.c_fc.bias",
                             h + "mlp.c_proj.weight", h + "mlp.c_proj.bias",
                             "transformer.ln_f.weight", "transformer.ln_f.bias"}));
  EXPECT_EQ(gpt->named_parameters()[h + "attn.c_attn.weight"].sizes(), (at::IntArrayRef{72, 24}));

  config = small_llama();
  config.num_layers = 1;
  const auto llama = make_model(config, 1);
  const std::string l = "model.layers.0.";
  EXPECT_EQ(names_of(*llama), (std::set<std::string>{
                                  "model.embed_tokens.weight", l + "input_layernorm.weight",
                                  l + "self_attn.q_proj.weight", l + "self_attn.k_proj.weight",
                                  l + "self_attn.v_proj.weight", l + "self_attn.o_proj.weight",
                                  l + "post_attention_layernorm.weight", l + "mlp.gate_proj.weight",
                                  l + "mlp.up_proj.weight", l + "mlp.down_proj.weight",
                                  "model.norm.weight", "lm_head.weight"}));
  EXPECT_EQ(llama->named_parameters()[l + "self_attn.k_proj.weight"].sizes(),
            (at::IntArrayRef{20, 24}));

  // Llama's parameters, and biases of queries, keys and values.
  config.family = "qwen2";
  const auto qwen2 = make_model(config, 1);
  std::set<std::string> with_biases = names_of(*llama);
  for (const char* name : {"q_proj.bias", "k_proj.bias", "v_proj.bias"})
    with_biases.insert(l + "self_attn." + name);
  EXPECT_EQ(names_of(*qwen2), with_biases);
  EXPECT_EQ(qwen2->named_parameters()[l + "self_attn.v_proj.bias"].sizes(), at::IntArrayRef{20});
}

TEST(MakeModel, ChecksThatAFamilysModuleHasTheLayersThatItSays) {
  Family other = family_named("llama");
  other.name = "other";
  register_family(other, [](const ModelConfig& config, std::uint64_t seed) {
    return std::make_shared<Llama>(config, seed, nn::Bias::added);
  });
  auto config = small_llama();
  config.family = "other";
  const auto has = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
  };
  std::string message = usage_error([&] { make_model(config, 1); });
  has(message, "\"other\"");
  has(message, "self_attn.q_proj.bias");
  // A name can be given only once.
  message = usage_error([&] { register_family(other, {}); });
  has(message, "has no module");
  message = usage_error([&] {
    register_family(other, [](const ModelConfig& c, std::uint64_t seed) {
      return std::make_shared<Llama>(c, seed);
    });
  });
  has(message, "already");
  // In this family the list has layers that the module lacks.
  Family more = family_named("qwen2");
  more.name = "more";
  register_family(more, [](const ModelConfig& c, std::uint64_t seed) {
    return std::make_shared<Llama>(c, seed);
  });
  config.family = "more";
  message = usage_error([&] { make_model(config, 1); });
  has(message, "9 parameters that its module does not have");
}

TEST(MakeModel, NamesTheFamiliesThatThereAre) {
  auto config = small_gpt();
  config.family = "mamba";
  const auto message = usage_error([&] { make_model(config, 1); });
  for (const char* part : {"\"mamba\"", "\"gpt2\"", "\"llama\"", "register_family"})
    EXPECT_NE(message.find(part), std::string::npos) << part << " in: " << message;
}

class EachFamily : public testing::TestWithParam<ModelConfig> {
 protected:
  std::shared_ptr<LanguageModel> evaluated() const {
    auto model = make_model(GetParam(), 1);
    model->eval();
    return model;
  }
};

INSTANTIATE_TEST_SUITE_P(Models, EachFamily, testing::ValuesIn(small_models()),
                         [](const auto& test) { return family_of(test.param); });

TEST_P(EachFamily, HasAsManyParametersAsTheFormulaSays) {
  for (const bool tied : {true, false}) {
    auto config = GetParam();
    config.tie_embeddings = tied;
    std::int64_t count = 0;
    const auto model = make_model(config, 1);
    for (const auto& parameter : model->parameters()) count += parameter.numel();
    EXPECT_EQ(count, num_parameters(config));
    std::map<std::string, std::vector<std::int64_t>> shapes;
    for (const auto& item : model->named_parameters())
      shapes[item.key()] = item.value().sizes().vec();
    EXPECT_EQ(shapes, parameter_shapes(config));
    EXPECT_EQ(names_of(*model).count("lm_head.weight"), tied ? 0u : 1u);
    EXPECT_TRUE(model->buffers().empty());
  }
}

TEST_P(EachFamily, BeginsWithWeightsBySeedAndName) {
  const auto model = make_model(GetParam(), 42);
  for (const auto& item : model->named_parameters()) {
    const auto& value = item.value();
    const auto begins = initial_weight(model->config(), item.key());
    if (begins.kind == InitialWeight::Kind::normal) {
      // Fills the second half alone.
      auto part = at::empty({value.numel() - value.numel() / 2});
      nn::fill_normal(part, 42, item.key(), begins.std, value.numel() / 2);
      EXPECT_TRUE(part.equal(value.detach().flatten().slice(0, value.numel() / 2))) << item.key();
    } else {
      EXPECT_EQ(value.dim(), 1) << item.key();
      const double constant = begins.kind == InitialWeight::Kind::ones ? 1.0 : 0.0;
      EXPECT_TRUE(value.eq(constant).all().item<bool>()) << item.key();
    }
  }
  const auto other = make_model(GetParam(), 43);
  EXPECT_FALSE(other->parameters().front().equal(model->parameters().front()));
}

TEST(LanguageModel, BeginsWithTheFamiliesDeviations) {
  const auto std_of = [](const ModelConfig& config, const char* name) {
    return initial_weight(config, name).std;
  };
  const auto gpt = small_gpt();
  EXPECT_DOUBLE_EQ(std_of(gpt, "transformer.wte.weight"), 0.02);
  EXPECT_DOUBLE_EQ(std_of(gpt, "transformer.h.0.attn.c_attn.weight"), 0.02);
  EXPECT_DOUBLE_EQ(std_of(gpt, "transformer.h.0.attn.c_proj.weight"), 0.02 / std::sqrt(6.0));
  EXPECT_DOUBLE_EQ(std_of(gpt, "transformer.h.0.mlp.c_proj.weight"), 0.02 / std::sqrt(6.0));
  EXPECT_DOUBLE_EQ(std_of(small_llama(), "model.layers.0.mlp.down_proj.weight"), 0.02);
}

TEST_P(EachFamily, LeavesTheGlobalGeneratorAlone) {
  at::manual_seed(3);
  const auto before = at::rand({4});
  at::manual_seed(3);
  make_model(GetParam(), 1);
  EXPECT_TRUE(at::rand({4}).equal(before));
}

TEST_P(EachFamily, SeesOnlyWhatCameBefore) {
  const c10::NoGradGuard no_grad;
  const auto model = evaluated();
  const auto tokens = some_tokens(GetParam(), 2, 12);
  const auto before = model->logits(tokens);
  auto changed = tokens.clone();
  changed.select(1, 7) = (changed.select(1, 7) + 1).remainder(GetParam().vocab_size);
  const auto after = model->logits(changed);
  EXPECT_TRUE(after.slice(1, 0, 7).equal(before.slice(1, 0, 7)));
  for (std::int64_t t = 7; t < 12; ++t)
    EXPECT_FALSE(after.select(1, t).allclose(before.select(1, t), 1e-7, 1e-7)) << t;
}

TEST_P(EachFamily, ReadsOnFromACache) {
  const c10::NoGradGuard no_grad;
  const auto model = evaluated();
  const auto tokens = some_tokens(GetParam(), 2, 15);
  const auto whole = model->hidden(tokens);
  KeyValueCache cache(20);
  std::int64_t read = 0;
  for (const std::int64_t count : {6, 1, 1, 4, 3}) {
    const auto part = model->extend(tokens.slice(1, read, read + count), cache);
    EXPECT_TRUE(part.allclose(whole.slice(1, read, read + count), 1e-4, 1e-5)) << read;
    read += count;
    EXPECT_EQ(cache.length(), read);
  }
  const auto message = usage_error([&] { model->extend(some_tokens(GetParam(), 2, 6), cache); });
  EXPECT_NE(message.find("6 tokens after 15"), std::string::npos) << message;
}

TEST_P(EachFamily, SumsTheLossOfTheTargetsThereAre) {
  const auto model = evaluated();
  const auto tokens = some_tokens(GetParam(), 2, 8);
  auto targets = some_tokens(GetParam(), 2, 8).flip(1);
  targets[0][3] = -100;
  targets[1][7] = -100;
  const auto [sum, count] = model->loss(tokens, targets);
  EXPECT_EQ(count, 14);
  const auto logits = model->logits(tokens).to(at::kDouble);
  const auto expected = at::cross_entropy_loss(logits.flatten(0, 1), targets.flatten(), {},
                                               at::Reduction::Sum, /*ignore_index=*/-100);
  EXPECT_NEAR(sum.item<double>(), expected.item<double>(), 1e-4);
}

TEST_P(EachFamily, GivesEveryParameterAGradient) {
  const auto model = make_model(GetParam(), 1);
  model->loss(some_tokens(GetParam(), 2, 20), some_tokens(GetParam(), 2, 20).flip(1))
      .sum.backward();
  for (const auto& item : model->named_parameters()) {
    ASSERT_TRUE(item.value().grad().defined()) << item.key();
    EXPECT_GT(item.value().grad().abs().max().item<double>(), 0) << item.key();
  }
}

// The loss of a batch is that of its halves, dropout included, wherever they are computed.
TEST_P(EachFamily, DropsAlikeInEveryLayout) {
  auto config = GetParam();
  config.dropout = 0.2;
  const auto model = make_model(config, 1);
  const auto tokens = some_tokens(config, 4, 10);
  const auto targets = tokens.flip(1);
  const auto loss_at = [&](std::uint64_t step, const std::vector<std::int64_t>& rows) {
    const auto held = at::tensor(rows, at::kLong);
    model->set_random_position(step, rows);
    return model->loss(tokens.index_select(0, held), targets.index_select(0, held))
        .sum.item<double>();
  };
  const double whole = loss_at(3, {0, 1, 2, 3});
  EXPECT_NEAR(loss_at(3, {0, 1}) + loss_at(3, {2, 3}), whole, 1e-4);
  EXPECT_NEAR(loss_at(3, {2, 0}) + loss_at(3, {3}) + loss_at(3, {1}), whole, 1e-4);
  EXPECT_NE(loss_at(4, {0, 1, 2, 3}), whole);
  model->eval();
  EXPECT_NE(loss_at(3, {0, 1, 2, 3}), whole);
  EXPECT_EQ(loss_at(3, {0, 1, 2, 3}), loss_at(4, {0, 1, 2, 3}));
}

// This holds with several micro-batches under way, too, each at its own random position.
TEST_P(EachFamily, RecomputesBlocksToTheSameBits) {
  auto config = GetParam();
  config.dropout = 0.2;
  const auto gradients = [&](double ratio, const activations::OperationKinds& kept = {}) {
    const KeepResults keep(kept);
    const auto model = make_model(config, 1);
    const SelectiveGradientCheckpointing recomputed(*model, ratio);
    EXPECT_EQ(recomputed.num_blocks(), 3u);
    std::vector<at::Tensor> losses;
    for (const std::int64_t row : {0, 1}) {
      model->set_random_position(3, {row});
      const auto tokens = some_tokens(config, 2, 10).slice(0, row, row + 1);
      losses.push_back(model->loss(tokens, tokens.flip(1)).sum);
    }
    for (const auto& loss : losses) loss.backward();
    for (const auto& parameter : model->parameters()) losses.push_back(parameter.grad());
    return losses;
  };
  const auto plain = gradients(0.0);
  for (const auto& found :
       {gradients(0.34), gradients(1.0),
        gradients(1.0, {OperationKind::matrix_product, OperationKind::attention})})
    for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(found[i].equal(plain[i])) << i;
}

TEST_P(EachFamily, RefusesOtherTokens) {
  const auto model = evaluated();
  for (const auto& tokens :
       {at::zeros({3}, at::kLong), at::zeros({1, 3}), at::zeros({1, 0}, at::kLong)})
    usage_error([&] { model->hidden(tokens); });
  const auto message = usage_error([&] { model->hidden(some_tokens(GetParam(), 1, 21)); });
  EXPECT_NE(message.find("21 tokens"), std::string::npos) << message;
  EXPECT_NE(message.find("20 positions"), std::string::npos) << message;
  usage_error([&] { model->loss(some_tokens(GetParam(), 1, 5), some_tokens(GetParam(), 1, 4)); });
  usage_error([] { make_model({}, 1); });
}

TEST_P(EachFamily, IsTheSameOnAGpu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU here";
  auto config = GetParam();
  config.dropout = 0.2;
  const auto tokens = some_tokens(config, 2, 12);
  const auto loss_on = [&](const at::Device& device) {
    const auto model = make_model(config, 1);
    model->to(device);
    model->set_random_position(3, {4, 7});
    return model->loss(tokens.to(device), tokens.flip(1).to(device)).sum.item<double>();
  };
  EXPECT_NEAR(loss_on(at::kCUDA), loss_on(at::kCPU), 1e-3);
}

// Two heads of keys and values for four heads of queries are the same as four of which each two are
// equal.
TEST(Llama, GroupedQueriesAreRepeatedKeys) {
  const c10::NoGradGuard no_grad;
  const auto grouped = make_model(small_llama(), 1);
  auto config = small_llama();
  config.num_kv_heads = 4;
  const auto full = make_model(config, 1);
  const auto from = grouped->named_parameters();
  for (auto& item : full->named_parameters()) {
    const auto& source = from[item.key()];
    const bool repeated = item.key().find("k_proj") != std::string::npos ||
                          item.key().find("v_proj") != std::string::npos;
    item.value().copy_(repeated ? source.view({2, 10, 24}).repeat_interleave(2, 0).view({40, 24})
                                : source);
  }
  const auto tokens = some_tokens(config, 2, 11);
  EXPECT_TRUE(full->logits(tokens).allclose(grouped->logits(tokens), 1e-5, 1e-6));
}

}  // namespace
}  // namespace lockstep::models
