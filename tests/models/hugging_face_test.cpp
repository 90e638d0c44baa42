#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>

#include <lockstep/checkpoint/format/folder.h>
#include <lockstep/checkpoint/format/reader.h>
#include <lockstep/checkpoint/safetensors/folder.h>
#include <lockstep/checkpoint/safetensors/writer.h>
#include <lockstep/models/folders/hugging_face_folder.h>
#include <lockstep/models/spec/family.h>
#include <lockstep/models/spec/hugging_face.h>

#include "../base/errors.h"
#include "../base/files.h"

namespace lockstep::models {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

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
  const ModelConfig expected{.family = "gpt2",
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
  const ModelConfig expected{.family = "llama",
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

TEST(HuggingFace, ReadsQwen2AsItIsPublished) {
  const auto config = from_hugging_face(R"({
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
    "intermediate_size": 4864, "max_position_embeddings": 131072, "max_window_layers": 24,
    "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 131072, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
    "use_cache": true, "use_sliding_window": false, "vocab_size": 151936})",
                                        kFile);
  const ModelConfig expected{.family = "qwen2",
                             .vocab_size = 151936,
                             .hidden_size = 896,
                             .num_layers = 24,
                             .num_heads = 14,
                             .num_kv_heads = 2,
                             .head_dim = 64,
                             .intermediate_size = 4864,
                             .max_positions = 131072,
                             .norm_eps = 1e-6,
                             .rope_theta = 1e6};
  EXPECT_EQ(config, expected);
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
  const auto qwen2 = from_hugging_face(R"({"model_type": "qwen2"})", kFile);
  // 32 layers with four weights of 4096 × 4096, three biases, three weights of 4096 × 22016 and two
  // norms; and an embedding, a head and a norm.
  EXPECT_EQ(num_parameters(qwen2),
            32LL * (4 * 4096 * 4096 + 3 * 4096 + 3 * 4096 * 22016 + 2 * 4096) +
                2 * 151936 * 4096LL + 4096);
  EXPECT_EQ(qwen2.max_positions, 32768);
  EXPECT_EQ(qwen2.norm_eps, 1e-6);
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
  const ModelConfig llama{.family = "llama",
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
  ModelConfig qwen2 = llama;
  qwen2.family = "qwen2";
  for (const bool tied : {true, false}) {
    qwen2.tie_embeddings = tied;
    EXPECT_EQ(from_hugging_face(to_hugging_face(qwen2), kFile), resolved(qwen2));
  }
}

struct BadText {
  const char* what;
  const char* text;
  const char* named;  // in the message, beside the file
};

class BadConfigJson : public ::testing::TestWithParam<BadText> {};

TEST_P(BadConfigJson, IsRefused) {
  const auto message = usage_error([] { from_hugging_face(GetParam().text, kFile); });
  EXPECT_NE(message.find(kFile), std::string::npos) << message;
  EXPECT_NE(message.find(GetParam().named), std::string::npos) << message;
}

INSTANTIATE_TEST_SUITE_P(
    Each, BadConfigJson,
    ::testing::Values(
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
        BadText{"sliding", R"({"model_type": "qwen2", "use_sliding_window": true})",
                "use_sliding_window is true"},
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
  ModelConfig config{.family = "gpt2"};
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
  const ModelConfig config{.family = "llama", .tie_embeddings = false};
  for (const char* name : {"model.layers.0.self_attn.q_proj.weight", "model.norm.weight",
                           "model.embed_tokens.weight", "lm_head.weight"}) {
    EXPECT_EQ(parameter_of(config, name), name);
    EXPECT_FALSE(stored_transposed(config, name));
  }
  EXPECT_EQ(parameter_of(config, "layers.0.mlp.up_proj.weight"),
            "model.layers.0.mlp.up_proj.weight");
  EXPECT_EQ(parameter_of(config, "model.layers.0.self_attn.rotary_emb.inv_freq"), std::nullopt);
}

TEST(HuggingFace, MapsTheNamesOfQwen2) {
  const ModelConfig config{.family = "qwen2"};
  for (const char* name :
       {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.bias"}) {
    EXPECT_EQ(parameter_of(config, name), name);
    EXPECT_FALSE(stored_transposed(config, name));
  }
  EXPECT_EQ(parameter_of(config, "layers.3.self_attn.v_proj.bias"),
            "model.layers.3.self_attn.v_proj.bias");
  EXPECT_EQ(parameter_of(config, "lm_head.weight"), std::nullopt);
}

// Writes a model in Hugging Face's form whose tensors are zeros, except those that `change`
// changes.
void write_model(
    const std::filesystem::path& folder, const ModelConfig& config,
    const std::function<void(std::vector<checkpoint::TensorDeclaration>&)>& change = {}) {
  std::vector<checkpoint::TensorDeclaration> tensors;
  for (auto [name, shape] : parameter_shapes(config)) {
    if (stored_transposed(config, name)) std::ranges::reverse(shape);
    tensors.push_back({name, checkpoint::DType::f32, shape});
  }
  if (change) change(tensors);
  create_directories(folder);
  testing::write_file(folder / "config.json", to_hugging_face(config));
  checkpoint::SafetensorsWriter writer(folder / checkpoint::kModelFile, tensors);
  for (const checkpoint::TensorEntry& entry : writer.entries())
    writer.write(std::vector<std::byte>(entry.size_bytes()));
  writer.commit();
}

const ModelConfig kGpt{.family = "gpt2",
                       .vocab_size = 11,
                       .hidden_size = 4,
                       .num_layers = 2,
                       .num_heads = 2,
                       .max_positions = 5};
const ModelConfig kLlama{.family = "llama",
                         .vocab_size = 11,
                         .hidden_size = 4,
                         .num_layers = 2,
                         .num_heads = 2,
                         .num_kv_heads = 1,
                         .intermediate_size = 6,
                         .tie_embeddings = false};

const ModelConfig kQwen2 = [] {
  ModelConfig config = kLlama;
  config.family = "qwen2";
  return config;
}();

// The error of both functions that read the model in a folder, which must be the same.
std::string refused(const std::filesystem::path& folder) {
  const std::string error = usage_error([&] { read_model_config(folder); });
  EXPECT_EQ(usage_error([&] { import_from_hugging_face(folder, folder / "imported"); }), error);
  EXPECT_FALSE(exists(folder / "imported"));
  return error;
}

TEST(HuggingFaceFolder, WhatFitsIsImportedAndExportedAsItWas) {
  for (const ModelConfig& config : {kGpt, kLlama, kQwen2}) {
    const testing::TemporaryFolder folder;
    // Tensors that files have for other reasons are no mistake.
    write_model(folder / "model", config, [&](auto& tensors) {
      if (config.tie_embeddings)
        tensors.push_back({"lm_head.weight", checkpoint::DType::f32, {11, 4}});
      tensors.push_back({"h.0" + family_named(config.family).buffers.front(),
                         checkpoint::DType::u8,
                         {1, 1, 5, 5}});
    });
    EXPECT_EQ(read_model_config(folder / "model"), resolved(config));
    const auto imported = import_from_hugging_face(folder / "model", folder / "run");
    EXPECT_EQ(read_model_config(imported), resolved(config));
    checkpoint::CheckpointReader reader(imported);
    export_to_hugging_face(reader, folder / "again");
    EXPECT_EQ(read_model_config(folder / "again"), resolved(config));
    EXPECT_THAT(usage_error([&] { import_from_hugging_face(imported, folder / "twice"); }),
                HasSubstr("is a checkpoint of Lockstep's already"));
  }
}

// An output layer under its own name either repeats the embedding, or belongs to another kind of
// model.
TEST(HuggingFaceFolder, AnOutputLayerOfItsOwnIsNotTakenForTheEmbedding) {
  for (const std::int64_t rows : {11, 12}) {
    const testing::TemporaryFolder folder;
    write_model(folder.path(), kGpt, [&](auto& tensors) {
      tensors.push_back({"lm_head.weight", checkpoint::DType::f32, {rows, 4}});
    });
    // Changes the last number, which was 0 like all others.
    std::string bytes = testing::read_file(folder / checkpoint::kModelFile);
    bytes.back() = 1;
    testing::write_file(folder / checkpoint::kModelFile, bytes);
    EXPECT_THAT(refused(folder.path()),
                AllOf(HasSubstr("'lm_head.weight', that is not 'transformer.wte.weight'"),
                      HasSubstr("tie_word_embeddings")));
  }
}

TEST(HuggingFaceFolder, TensorsThatAreNotThoseOfTheConfigAreNamed) {
  const auto told = [](ModelConfig config, const auto& change) {
    const testing::TemporaryFolder folder;
    write_model(folder.path(), config);
    change(config);
    testing::write_file(folder / "config.json", to_hugging_face(config));
    return refused(folder.path());
  };
  EXPECT_THAT(told(kGpt, [](ModelConfig& c) { c.num_layers = 1; }),
              AllOf(HasSubstr("12 that the config.json does not account for: "
                              "'transformer.h.1.attn.c_attn.bias' [12]"),
                    Not(HasSubstr("missing"))));
  EXPECT_THAT(told(kGpt, [](ModelConfig& c) { c.num_layers = 3; }),
              AllOf(HasSubstr("12 missing: 'transformer.h.2.attn.c_attn.bias' [12]"),
                    Not(HasSubstr("account for"))));
  EXPECT_THAT(told(kGpt, [](ModelConfig& c) { c.vocab_size = 12; }),
              HasSubstr("1 of another shape: 'transformer.wte.weight' is [11, 4] and should be "
                        "[12, 4]"));
  EXPECT_THAT(told(kGpt, [](ModelConfig& c) { c.hidden_size = 8; }),
              AllOf(HasSubstr("28 of another shape: "),
                    HasSubstr("'transformer.h.0.attn.c_attn.weight' is [4, 12] and should be "
                              "[8, 24]")));
  EXPECT_THAT(told(kLlama, [](ModelConfig& c) { c.num_kv_heads = 2; }),
              HasSubstr("4 of another shape: 'model.layers.0.self_attn.k_proj.weight' is [2, 4] "
                        "and should be [4, 4]"));
  // A Llama's tensors do not make a Qwen2.
  EXPECT_THAT(told(kLlama, [](ModelConfig& c) { c.family = "qwen2"; }),
              HasSubstr("6 missing: 'model.layers.0.self_attn.k_proj.bias' [2]"));
  const auto changed = [](const auto& change) {
    const testing::TemporaryFolder folder;
    write_model(folder.path(), kLlama, change);
    return refused(folder.path());
  };
  EXPECT_THAT(changed([](auto& tensors) { tensors.erase(tensors.begin()); }),
              HasSubstr("1 missing: 'lm_head.weight' [11, 4]"));
  EXPECT_THAT(changed([](auto& tensors) {
                tensors.push_back({"score.weight", checkpoint::DType::f32, {2, 4}});
              }),
              HasSubstr("1 that the config.json does not account for: 'score.weight' [2, 4]"));
  EXPECT_THAT(changed([](auto& tensors) {
                tensors.push_back({"norm.weight", checkpoint::DType::f32, {4}});
              }),
              HasSubstr("1 there twice: 'norm.weight'"));
  EXPECT_THAT(changed([](auto& tensors) { tensors[0].dtype = checkpoint::DType::i32; }),
              HasSubstr("1 of another type: 'lm_head.weight' is I32"));
}

TEST(HuggingFaceFolder, OnlyRegularFilesAreRead) {
  for (const char* file : {"config.json", checkpoint::kModelFile}) {
    const testing::TemporaryFolder folder;
    write_model(folder.path(), kGpt);
    remove(folder / file);
    ASSERT_EQ(::mkfifo((folder / file).c_str(), 0600), 0);
    EXPECT_THAT(refused(folder.path()), AllOf(HasSubstr(file), HasSubstr("is a FIFO")));
  }
}

}  // namespace
}  // namespace lockstep::models
