// Compares the models with their papers' formulas, written with LibTorch's operators, one head and
// one token at a time.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/models/make_model.h>
#include <lockstep/nn/layers/random.h>

#include "configs.h"

namespace lockstep::models {
namespace {

// The parameters of a model by name, in double.
class Weights {
 public:
  explicit Weights(const LanguageModel& model) : parameters_(model.named_parameters()) {}

  at::Tensor operator[](const std::string& name) const {
    return parameters_[name].detach().to(at::kDouble);
  }
  // Computes x · weightᵀ + bias, if there is a bias.
  at::Tensor linear(const at::Tensor& x, const std::string& name) const {
    const auto y = at::matmul(x, (*this)[name + ".weight"].t());
    return parameters_.contains(name + ".bias") ? y + (*this)[name + ".bias"] : y;
  }

 private:
  torch::OrderedDict<std::string, at::Tensor> parameters_;
};

// A model whose weights differ from each other as those of a trained model do, including biases and
// norms.
std::shared_ptr<LanguageModel> lively_model(const ModelConfig& config) {
  auto model = make_model(config, 1);
  for (const auto& item : model->named_parameters()) {
    nn::fill_normal(item.value(), 5, item.key(), 0.2);
    const c10::NoGradGuard no_grad;
    if (item.key().find("norm") != std::string::npos || item.key().find("ln_") != std::string::npos)
      item.value().add_(0.8);
  }
  model->eval();
  return model;
}

// Attention of one head: q [length, d], k and v [length, d]; each token sees itself and the tokens
// before it.
at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  auto y = at::zeros_like(q);
  for (std::int64_t t = 0; t < q.size(0); ++t) {
    const auto seen = k.slice(0, 0, t + 1);
    const auto scores = at::mv(seen, q[t]) / std::sqrt(static_cast<double>(q.size(1)));
    const auto shares = scores.exp() / scores.exp().sum();
    y[t] = at::mv(v.slice(0, 0, t + 1).t(), shares);
  }
  return y;
}

at::Tensor columns(const at::Tensor& x, std::int64_t part, std::int64_t width) {
  return x.slice(1, part * width, (part + 1) * width);
}

// Computes logits [length, vocab] of tokens [length].
at::Tensor gpt2_by_formula(const LanguageModel& model, const at::Tensor& tokens) {
  const auto& c = model.config();
  const Weights w(model);
  const auto norm = [&](const at::Tensor& x, const std::string& name) {
    const auto centred = x - x.mean(1, true);
    const auto variance = centred.square().mean(1, true);
    return centred / (variance + c.norm_eps).sqrt() * w[name + ".weight"] + w[name + ".bias"];
  };
  auto x = w["transformer.wte.weight"].index_select(0, tokens) +
           w["transformer.wpe.weight"].slice(0, 0, tokens.size(0));
  for (std::int64_t i = 0; i < c.num_layers; ++i) {
    const std::string name = "transformer.h." + std::to_string(i);
    const auto qkv = w.linear(norm(x, name + ".ln_1"), name + ".attn.c_attn");
    std::vector<at::Tensor> heads;
    for (std::int64_t h = 0; h < c.num_heads; ++h)
      heads.push_back(attend(columns(columns(qkv, 0, c.hidden_size), h, c.head_dim),
                             columns(columns(qkv, 1, c.hidden_size), h, c.head_dim),
                             columns(columns(qkv, 2, c.hidden_size), h, c.head_dim)));
    x = x + w.linear(at::cat(heads, 1), name + ".attn.c_proj");
    const auto inner = w.linear(norm(x, name + ".ln_2"), name + ".mlp.c_fc");
    const auto gelu =
        c.activation == Activation::gelu_tanh
            ? 0.5 * inner *
                  (1 +
                   (std::sqrt(2 / 3.14159265358979324) * (inner + 0.044715 * inner.pow(3))).tanh())
            : 0.5 * inner * (1 + (inner / std::sqrt(2.0)).erf());
    x = x + w.linear(gelu, name + ".mlp.c_proj");
  }
  return at::matmul(norm(x, "transformer.ln_f"), w["transformer.wte.weight"].t());
}

at::Tensor turned(const at::Tensor& x, double theta) {
  auto y = x.clone();
  const auto half = x.size(1) / 2;
  for (std::int64_t t = 0; t < x.size(0); ++t)
    for (std::int64_t i = 0; i < half; ++i) {
      const double angle =
          static_cast<double>(t) *
          std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(x.size(1)));
      y[t][i] = x[t][i] * std::cos(angle) - x[t][i + half] * std::sin(angle);
      y[t][i + half] = x[t][i] * std::sin(angle) + x[t][i + half] * std::cos(angle);
    }
  return y;
}

at::Tensor llama_by_formula(const LanguageModel& model, const at::Tensor& tokens) {
  const auto& c = model.config();
  const Weights w(model);
  const auto norm = [&](const at::Tensor& x, const std::string& name) {
    return x / (x.square().mean(1, true) + c.norm_eps).sqrt() * w[name + ".weight"];
  };
  auto x = w["model.embed_tokens.weight"].index_select(0, tokens);
  for (std::int64_t i = 0; i < c.num_layers; ++i) {
    const std::string name = "model.layers." + std::to_string(i);
    const auto y = norm(x, name + ".input_layernorm");
    const auto q = w.linear(y, name + ".self_attn.q_proj");
    const auto k = w.linear(y, name + ".self_attn.k_proj");
    const auto v = w.linear(y, name + ".self_attn.v_proj");
    std::vector<at::Tensor> heads;
    for (std::int64_t h = 0; h < c.num_heads; ++h) {
      const auto group = h / (c.num_heads / c.num_kv_heads);
      heads.push_back(attend(turned(columns(q, h, c.head_dim), c.rope_theta),
                             turned(columns(k, group, c.head_dim), c.rope_theta),
                             columns(v, group, c.head_dim)));
    }
    x = x + w.linear(at::cat(heads, 1), name + ".self_attn.o_proj");
    const auto z = norm(x, name + ".post_attention_layernorm");
    const auto gate = w.linear(z, name + ".mlp.gate_proj");
    x = x + w.linear(gate / (1 + (-gate).exp()) * w.linear(z, name + ".mlp.up_proj"),
                     name + ".mlp.down_proj");
  }
  const auto head = c.tie_embeddings ? "model.embed_tokens.weight" : "lm_head.weight";
  return at::matmul(norm(x, "model.norm"), w[head].t());
}

using Formula = at::Tensor (*)(const LanguageModel& model, const at::Tensor& tokens);

void expect_by_formula(const ModelConfig& config, Formula formula) {
  const c10::NoGradGuard no_grad;
  const auto model = lively_model(config);
  const auto tokens = some_tokens(config, 2, 9);
  const auto found = model->logits(tokens);
  for (std::int64_t i = 0; i < 2; ++i) {
    const auto expected = formula(*model, tokens[i]);
    EXPECT_GT(expected.std().item<double>(), 0.1);
    const auto difference = (found[i].to(at::kDouble) - expected).abs().max().item<double>();
    EXPECT_LT(difference, 2e-5 * expected.abs().max().item<double>());
  }
}

TEST(Formula, OfGpt2) {
  auto config = small_gpt();
  expect_by_formula(config, gpt2_by_formula);
  config.activation = Activation::gelu_erf;
  expect_by_formula(config, gpt2_by_formula);
}

TEST(Formula, OfLlama) {
  auto config = small_llama();
  expect_by_formula(config, llama_by_formula);
  config.tie_embeddings = true;
  config.num_kv_heads = 4;
  config.rope_theta = 50.0;
  expect_by_formula(config, llama_by_formula);
}

// Llama's formula adds biases if there are any.
TEST(Formula, OfQwen2) {
  auto config = small_qwen2();
  EXPECT_TRUE(
      lively_model(config)->named_parameters().contains("model.layers.2.self_attn.k_proj.bias"));
  expect_by_formula(config, llama_by_formula);
  config.tie_embeddings = false;
  expect_by_formula(config, llama_by_formula);
}

}  // namespace
}  // namespace lockstep::models
