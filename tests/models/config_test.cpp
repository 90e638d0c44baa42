#include <gtest/gtest.h>

#include <limits>
#include <string>

#include <lockstep/models/spec/config.h>

#include "../base/errors.h"

namespace lockstep::models {
namespace {

ModelConfig small(const std::string& family) {
  return {.family = family, .vocab_size = 256, .hidden_size = 96, .num_layers = 2, .num_heads = 6};
}

TEST(ModelConfig, FillsInWhatIsLeftOut) {
  const auto gpt = resolved(small("gpt2"));
  EXPECT_EQ(gpt.num_kv_heads, 6);
  EXPECT_EQ(gpt.head_dim, 16);
  EXPECT_EQ(gpt.intermediate_size, 384);
  // 8/3 · 96 is 256; a width larger by one gives the next multiple of 64.
  EXPECT_EQ(resolved(small("llama")).intermediate_size, 256);
  auto wider = small("llama");
  wider.hidden_size = 120;
  EXPECT_EQ(resolved(wider).intermediate_size, 320);
  EXPECT_EQ(resolved(gpt), gpt);
}

// The published sizes: GPT-2's, the smallest Llama 2's, and Llama 3's, whose queries are grouped.
TEST(ModelConfig, CountsParametersOfKnownModels) {
  EXPECT_EQ(num_parameters({.vocab_size = 50257,
                            .hidden_size = 768,
                            .num_layers = 12,
                            .num_heads = 12,
                            .max_positions = 1024}),
            124'439'808);
  EXPECT_EQ(num_parameters({.family = "llama",
                            .vocab_size = 32000,
                            .hidden_size = 4096,
                            .num_layers = 32,
                            .num_heads = 32,
                            .intermediate_size = 11008,
                            .tie_embeddings = false}),
            6'738'415'616);
  EXPECT_EQ(num_parameters({.family = "llama",
                            .vocab_size = 128256,
                            .hidden_size = 4096,
                            .num_layers = 32,
                            .num_heads = 32,
                            .num_kv_heads = 8,
                            .intermediate_size = 14336,
                            .tie_embeddings = false}),
            8'030'261'248);
  // Qwen2 0.5B, which is tied, and Qwen2 7B.
  EXPECT_EQ(num_parameters({.family = "qwen2",
                            .vocab_size = 151936,
                            .hidden_size = 896,
                            .num_layers = 24,
                            .num_heads = 14,
                            .num_kv_heads = 2,
                            .intermediate_size = 4864}),
            494'032'768);
  EXPECT_EQ(num_parameters({.family = "qwen2",
                            .vocab_size = 152064,
                            .hidden_size = 3584,
                            .num_layers = 28,
                            .num_heads = 28,
                            .num_kv_heads = 4,
                            .intermediate_size = 18944,
                            .tie_embeddings = false}),
            7'615'616'512);
}

// 6 operations for each of 123.5 million weights that are multiplied, and 56.6 million for
// attention; for the second model 887.6 million weights and 805 million.
TEST(ModelConfig, CountsOperationsOfATokenInTraining) {
  EXPECT_NEAR(
      training_flops_per_token(
          {.vocab_size = 50304, .hidden_size = 768, .num_layers = 12, .num_heads = 12}, 1024),
      6 * (12 * 12 * 768.0 * 768 + 50304.0 * 768) + 6 * 12 * 768.0 * 1024, 1);
  const ModelConfig llama{.family = "llama",
                          .vocab_size = 32000,
                          .hidden_size = 2048,
                          .num_layers = 16,
                          .num_heads = 16,
                          .intermediate_size = 5632,
                          .tie_embeddings = false};
  EXPECT_NEAR(
      training_flops_per_token(llama, 4096),
      6 * (16 * (4 * 2048.0 * 2048 + 3 * 2048.0 * 5632) + 32000.0 * 2048) + 6 * 16 * 2048.0 * 4096,
      1);
  // The projections of two heads of keys and values are smaller.
  ModelConfig grouped = llama;
  grouped.num_kv_heads = 2;
  EXPECT_NEAR(training_flops_per_token(llama, 1) - training_flops_per_token(grouped, 1),
              6 * 16 * 2 * 2048.0 * 128 * 14, 1);
}

TEST(ModelConfig, CountsTheLargestThatPasses) {
  ModelConfig config{.family = "llama",
                     .vocab_size = std::int64_t{1} << 31,
                     .hidden_size = 1 << 20,
                     .num_layers = 1 << 16,
                     .num_heads = 1,
                     .intermediate_size = 1 << 24,
                     .max_positions = std::int64_t{1} << 31,
                     .tie_embeddings = false};
  const auto llama = num_parameters(config);
  EXPECT_GT(llama, std::int64_t{3} << 60);
  config.family = "gpt2";
  EXPECT_GT(num_parameters(config), std::int64_t{2} << 60);
}

struct Mistake {
  const char* what;
  void (*change)(ModelConfig&);
  std::vector<std::string> named;  // parts of the message
};

class BadConfig : public ::testing::TestWithParam<Mistake> {};

TEST_P(BadConfig, IsRefusedWithItsNumbers) {
  auto config = small("llama");
  GetParam().change(config);
  for (const auto& call :
       {+[](const ModelConfig& c) { check(c); }, +[](const ModelConfig& c) { resolved(c); },
        +[](const ModelConfig& c) { num_parameters(c); }}) {
    const auto message = usage_error([&] { call(config); });
    for (const auto& word : GetParam().named)
      EXPECT_NE(message.find(word), std::string::npos) << word << " in: " << message;
  }
}

constexpr auto kNan = std::numeric_limits<double>::quiet_NaN();

INSTANTIATE_TEST_SUITE_P(
    Each, BadConfig,
    ::testing::Values(
        Mistake{"vocab", [](ModelConfig& c) { c.vocab_size = 0; }, {"vocab_size", "0"}},
        Mistake{"hidden", [](ModelConfig& c) { c.hidden_size = -96; }, {"hidden_size", "-96"}},
        Mistake{"too_wide", [](ModelConfig& c) { c.hidden_size = 1ll << 40; }, {"hidden_size"}},
        Mistake{"layers", [](ModelConfig& c) { c.num_layers = 0; }, {"num_layers"}},
        Mistake{"heads", [](ModelConfig& c) { c.num_heads = 0; }, {"num_heads"}},
        Mistake{"heads_of_width", [](ModelConfig& c) { c.num_heads = 7; }, {"96", "7"}},
        Mistake{"kv_of_heads", [](ModelConfig& c) { c.num_kv_heads = 4; }, {"num_kv_heads 4", "6"}},
        Mistake{"kv_more", [](ModelConfig& c) { c.num_kv_heads = 12; }, {"num_kv_heads", "12"}},
        Mistake{"odd_head", [](ModelConfig& c) { c.num_heads = 32; }, {"3 wide", "even"}},
        Mistake{"head_dim", [](ModelConfig& c) { c.head_dim = 1ll << 62; }, {"head_dim"}},
        Mistake{"inner", [](ModelConfig& c) { c.intermediate_size = -1; }, {"intermediate_size"}},
        Mistake{"positions", [](ModelConfig& c) { c.max_positions = 0; }, {"max_positions"}},
        Mistake{"eps", [](ModelConfig& c) { c.norm_eps = 0; }, {"norm_eps"}},
        Mistake{"eps_nan", [](ModelConfig& c) { c.norm_eps = kNan; }, {"norm_eps"}},
        Mistake{"theta", [](ModelConfig& c) { c.rope_theta = kNan; }, {"rope_theta"}},
        Mistake{"dropout", [](ModelConfig& c) { c.dropout = 1; }, {"dropout", "1"}},
        Mistake{"grouped_gpt2",
                [](ModelConfig& c) {
                  c.family = "gpt2";
                  c.num_kv_heads = 3;
                },
                {"num_kv_heads is 3 of 6", "\"gpt2\"", "\"llama\""}},
        Mistake{"family",
                [](ModelConfig& c) { c.family = "mamba"; },
                {"\"mamba\"", "\"gpt2\", \"llama\" or \"qwen2\""}},
        Mistake{"narrow_gpt2",
                [](ModelConfig& c) {
                  c.family = "gpt2";
                  c.head_dim = 8;
                },
                {"head_dim 8", "96"}}),
    [](const auto& test) { return std::string(test.param.what); });

}  // namespace
}  // namespace lockstep::models
