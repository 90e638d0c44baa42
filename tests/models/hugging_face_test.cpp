#include <gtest/gtest.h>

#include <lockstep/models/hugging_face.h>

#include "../base/errors.h"

namespace lockstep::models {
namespace {

constexpr const char* kFile = "folder/config.json";

TEST(HuggingFace, ReadsGpt2AsItIsPublished) {
  const auto config = from_hugging_face(R"({
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
    "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
    "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": null,
    "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}},
    "vocab_size": 50257})",
                                        kFile);
  const ModelConfig expected{.family = Family::gpt2,
                             .vocab_size = 50257,
                             .hidden_size = 768,
                             .num_layers = 12,
                             .num_heads = 12,
                             .num_kv_heads = 12,
                             .head_dim = 64,
                             .intermediate_size = 3072,
                             .max_positions = 1024};
  EXPECT_EQ(config, expected);
}

TEST(HuggingFace, ReadsLlamaOldAndNew) {
  const std::string start = R"({"model_type": "llama", "vocab_size": 128256, "hidden_size": 2048,
    "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-05,
    "max_position_embeddings": 4096, "tie_word_embeddings": true, "attention_bias": false,
    "eos_token_id": [128001, 128008], "pretraining_tp": 1)";
  const ModelConfig expected{.family = Family::llama,
                             .vocab_size = 128256,
                             .hidden_size = 2048,
                             .num_layers = 16,
                             .num_heads = 32,
                             .num_kv_heads = 8,
                             .head_dim = 128,
                             .intermediate_size = 8192,
                             .max_positions = 4096,
                             .rope_theta = 500000.0};
  for (const char* rest :
       {R"(, "rope_theta": 500000.0, "rope_scaling": null})",
        R"(, "rope_theta": 500000, "rope_scaling": {"type": "default"}})",
        R"(, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}})"})
    EXPECT_EQ(from_hugging_face(start + rest, kFile), expected) << rest;
}

TEST(HuggingFace, FillsInWhatTransformersLeavesOut) {
  const auto gpt = from_hugging_face(R"({"model_type": "gpt2"})", kFile);
  EXPECT_EQ(num_parameters(gpt), 124'439'808);
  EXPECT_TRUE(gpt.tie_embeddings);
  const auto llama = from_hugging_face(R"({"model_type": "llama"})", kFile);
  EXPECT_EQ(num_parameters(llama), 6'738'415'616);
  EXPECT_EQ(llama.norm_eps, 1e-6);
  EXPECT_EQ(llama.rope_theta, 10000.0);
  EXPECT_FALSE(llama.tie_embeddings);
}

TEST(HuggingFace, WritesWhatItReads) {
  ModelConfig gpt{.vocab_size = 300,
                  .hidden_size = 64,
                  .num_layers = 3,
                  .num_heads = 4,
                  .intermediate_size = 100,
                  .max_positions = 77,
                  .norm_eps = 3e-6,
                  .activation = Activation::gelu_erf,
                  .tie_embeddings = false};
  EXPECT_EQ(from_hugging_face(to_hugging_face(gpt), kFile), resolved(gpt));
  gpt.dropout = 0.1;
  EXPECT_EQ(from_hugging_face(to_hugging_face(gpt), kFile).dropout, 0.0);
  const ModelConfig llama{.family = Family::llama,
                          .vocab_size = 300,
                          .hidden_size = 64,
                          .num_layers = 3,
                          .num_heads = 4,
                          .num_kv_heads = 2,
                          .head_dim = 32,
                          .max_positions = 77,
                          .norm_eps = 3e-6,
                          .rope_theta = 12345.0};
  EXPECT_EQ(from_hugging_face(to_hugging_face(llama), kFile), resolved(llama));
}

struct BadText {
  const char* what;
  const char* text;
  const char* named;  // in the message, besides the file
};

class BadConfigJson : public testing::TestWithParam<BadText> {};

TEST_P(BadConfigJson, IsRefused) {
  const auto message = usage_error([] { from_hugging_face(GetParam().text, kFile); });
  EXPECT_NE(message.find(kFile), std::string::npos) << message;
  EXPECT_NE(message.find(GetParam().named), std::string::npos) << message;
}

INSTANTIATE_TEST_SUITE_P(
    Each, BadConfigJson,
    testing::Values(
        BadText{"empty", "", "JSON"}, BadText{"cut", R"({"model_type": )", "JSON"},
        BadText{"list", "[1]", "object"},
        BadText{"deep", "{\"a\":[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]}", "deep"},
        BadText{"no_type", "{}", "model_type is missing"},
        BadText{"other_type", R"({"model_type": "mamba"})", "mamba"},
        BadText{"type_of_type", R"({"model_type": 3})", "model_type is 3"},
        BadText{"word", R"({"model_type": "gpt2", "n_embd": "768"})", R"(n_embd is "768")"},
        BadText{"half", R"({"model_type": "gpt2", "n_layer": 1.5})", "n_layer is 1.5"},
        BadText{"huge", R"({"model_type": "gpt2", "n_layer": 18446744073709551615})", "n_layer"},
        BadText{"negative", R"({"model_type": "gpt2", "n_layer": -1})", "num_layers is -1"},
        BadText{"heads", R"({"model_type": "gpt2", "n_head": 7})", "768"},
        BadText{"relu", R"({"model_type": "gpt2", "activation_function": "relu"})", "\"relu\""},
        BadText{"unscaled", R"({"model_type": "gpt2", "scale_attn_weights": false})",
                "scale_attn_weights is false"},
        BadText{"by_layer", R"({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": true})",
                "scale_attn_by_inverse_layer_idx is true"},
        BadText{"cross", R"({"model_type": "gpt2", "add_cross_attention": true})",
                "add_cross_attention"},
        BadText{"quantised", R"({"model_type": "llama", "quantization_config": {"bits": 4}})",
                R"({"bits":4})"},
        BadText{"gelu", R"({"model_type": "llama", "hidden_act": "gelu"})",
                R"(hidden_act is "gelu")"},
        BadText{"bias", R"({"model_type": "llama", "attention_bias": true})",
                "attention_bias is true"},
        BadText{"mlp_bias", R"({"model_type": "llama", "mlp_bias": true})", "mlp_bias is true"},
        BadText{
            "scaled",
            R"({"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8.0}})",
            "rope_scaling is {"},
        BadText{"scaled_old", R"({"model_type": "llama", "rope_scaling": {"type": "linear"}})",
                "linear"},
        BadText{"scaled_new",
                R"({"model_type": "llama", "rope_parameters": {"rope_type": "yarn", "factor": 2}})",
                "yarn"},
        BadText{"rope_word", R"({"model_type": "llama", "rope_parameters": "default"})",
                "rope_parameters"},
        BadText{"partial",
                R"({"model_type": "llama", "rope_parameters": {"partial_rotary_factor": 0.5}})",
                "partial_rotary_factor is 0.5"},
        BadText{"theta", R"({"model_type": "llama", "rope_theta": "x"})", "rope_theta"},
        BadText{"flag", R"({"model_type": "llama", "tie_word_embeddings": 1})",
                "tie_word_embeddings is 1"}),
    [](const auto& test) { return std::string(test.param.what); });

TEST(HuggingFace, MessagesStayShort) {
  const std::string text =
      R"({"model_type": "gpt2", "n_embd": ")" + std::string(100'000, 'x') + "\"}";
  EXPECT_LT(usage_error([&] { from_hugging_face(text, kFile); }).size(), 400u);
}

TEST(HuggingFace, MapsTheNamesOfGpt2) {
  ModelConfig config{.family = Family::gpt2};
  EXPECT_EQ(parameter_of(config, "h.0.attn.c_attn.weight"), "transformer.h.0.attn.c_attn.weight");
  EXPECT_EQ(parameter_of(config, "transformer.wte.weight"), "transformer.wte.weight");
  EXPECT_EQ(parameter_of(config, "h.0.attn.c_attn.bias"), "transformer.h.0.attn.c_attn.bias");
  EXPECT_EQ(parameter_of(config, "h.0.attn.bias"), std::nullopt);
  EXPECT_EQ(parameter_of(config, "transformer.h.0.attn.masked_bias"), std::nullopt);
  EXPECT_EQ(parameter_of(config, "lm_head.weight"), std::nullopt);
  config.tie_embeddings = false;
  EXPECT_EQ(parameter_of(config, "lm_head.weight"), "lm_head.weight");
  for (const char* name : {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}) {
    const std::string full = std::string("transformer.h.11.") + name;
    EXPECT_TRUE(stored_transposed(config, full + ".weight")) << name;
    EXPECT_FALSE(stored_transposed(config, full + ".bias")) << name;
  }
  for (const char* name : {"transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight",
                           "transformer.h.0.ln_1.weight"})
    EXPECT_FALSE(stored_transposed(config, name)) << name;
  EXPECT_EQ(file_name_of("transformer.wte.weight"), "transformer.wte.weight");
}

TEST(HuggingFace, MapsTheNamesOfLlama) {
  const ModelConfig config{.family = Family::llama, .tie_embeddings = false};
  for (const char* name : {"model.layers.0.self_attn.q_proj.weight", "model.norm.weight",
                           "model.embed_tokens.weight", "lm_head.weight"}) {
    EXPECT_EQ(parameter_of(config, name), name);
    EXPECT_FALSE(stored_transposed(config, name));
  }
  EXPECT_EQ(parameter_of(config, "layers.0.mlp.up_proj.weight"),
            "model.layers.0.mlp.up_proj.weight");
  EXPECT_EQ(parameter_of(config, "model.layers.0.self_attn.rotary_emb.inv_freq"), std::nullopt);
}

}  // namespace
}  // namespace lockstep::models
