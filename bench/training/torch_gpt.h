// GPT-2 in plain torch::nn.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include <torch/torch.h>
#include <torch/version.h>

#include "job.h"

namespace lockstep::bench {

struct GptShape {
  std::int64_t vocabulary = kVocabulary;
  std::int64_t width = kWidth;
  std::int64_t layers = kLayers;
  std::int64_t heads = kHeads;
  std::int64_t tokens = kTokens;
};

// In these modules x is [batch, length, width].

struct TorchAttentionImpl : torch::nn::Module {
  explicit TorchAttentionImpl(const GptShape& given)
      : shape(given), c_attn(shape.width, 3 * shape.width), c_proj(shape.width, shape.width) {
    register_module("c_attn", c_attn);
    register_module("c_proj", c_proj);
  }

  at::Tensor forward(const at::Tensor& x) {
    const auto qkv = c_attn(x).chunk(3, -1);
    const auto heads = [this](const at::Tensor& part) {
      return part.view({part.size(0), part.size(1), shape.heads, -1}).transpose(1, 2);
    };
    const auto q = heads(qkv[0]), k = heads(qkv[1]), v = heads(qkv[2]);
#if TORCH_VERSION_MAJOR >= 2
    const auto y = at::scaled_dot_product_attention(q, k, v, {}, 0.0, /*is_causal=*/true);
#else
    if (!hidden.defined()) hidden = at::ones({shape.tokens, shape.tokens}, at::kBool).triu(1);
    auto scores = at::matmul(q, k.transpose(-2, -1)) / std::sqrt(static_cast<double>(q.size(-1)));
    scores = scores.masked_fill(hidden, -std::numeric_limits<double>::infinity());
    const auto y = at::matmul(scores.softmax(-1), v);
#endif
    return c_proj(y.transpose(1, 2).contiguous().view(x.sizes()));
  }

  GptShape shape;
  torch::nn::Linear c_attn, c_proj;
  at::Tensor hidden;  // true for positions that a token does not see
};
TORCH_MODULE(TorchAttention);

struct TorchBlockImpl : torch::nn::Module {
  explicit TorchBlockImpl(const GptShape& shape)
      : ln_1(torch::nn::LayerNormOptions({shape.width})),
        attn(shape),
        ln_2(torch::nn::LayerNormOptions({shape.width})),
        mlp(torch::nn::Linear(shape.width, 4 * shape.width),
            torch::nn::GELU(torch::nn::GELUOptions().approximate("tanh")),
            torch::nn::Linear(4 * shape.width, shape.width)) {
    register_module("ln_1", ln_1);
    register_module("attn", attn);
    register_module("ln_2", ln_2);
    register_module("mlp", mlp);
  }

  at::Tensor forward(const at::Tensor& x) {
    const auto y = x + attn(ln_1(x));
    return y + mlp->forward(ln_2(y));
  }

  torch::nn::LayerNorm ln_1;
  TorchAttention attn;
  torch::nn::LayerNorm ln_2;
  torch::nn::Sequential mlp;
};
TORCH_MODULE(TorchBlock);

struct TorchGptImpl : torch::nn::Module {
  explicit TorchGptImpl(const GptShape& shape = {})
      : wte(shape.vocabulary, shape.width),
        wpe(shape.tokens, shape.width),
        ln_f(torch::nn::LayerNormOptions({shape.width})) {
    register_module("wte", wte);
    register_module("wpe", wpe);
    for (std::int64_t layer = 0; layer < shape.layers; ++layer)
      blocks->push_back(TorchBlock(shape));
    register_module("h", blocks);
    register_module("ln_f", ln_f);
    const torch::NoGradGuard no_grad;
    for (auto& parameter : parameters())
      if (parameter.dim() == 2) parameter.normal_(0, 0.02);
  }

  // Returns the mean loss. Targets are [batch, length], like tokens.
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& targets) {
    auto x = wte(tokens) + wpe(at::arange(tokens.size(1), tokens.options()));
    x = ln_f(blocks->forward(x));
    const auto logits = torch::nn::functional::linear(x, wte->weight);
    return torch::nn::functional::cross_entropy(logits.flatten(0, 1), targets.view(-1));
  }

  torch::nn::Embedding wte, wpe;
  torch::nn::Sequential blocks;
  torch::nn::LayerNorm ln_f;
};
TORCH_MODULE(TorchGpt);

}  // namespace lockstep::bench
