// GPT-2 as one writes it in plain torch::nn.
#pragma once

#include <cmath>
#include <limits>

#include <torch/torch.h>
#include <torch/version.h>

#include "job.h"

namespace lockstep::bench {

// In what follows x is [batch, length, width].

struct TorchAttentionImpl : torch::nn::Module {
  TorchAttentionImpl() {
    register_module("c_attn", c_attn);
    register_module("c_proj", c_proj);
  }

  at::Tensor forward(const at::Tensor& x) {
    const auto qkv = c_attn(x).chunk(3, -1);
    const auto heads = [](const at::Tensor& part) {
      return part.view({part.size(0), part.size(1), kHeads, kWidth / kHeads}).transpose(1, 2);
    };
    const auto q = heads(qkv[0]), k = heads(qkv[1]), v = heads(qkv[2]);
#if TORCH_VERSION_MAJOR >= 2
    const auto y = at::scaled_dot_product_attention(q, k, v, {}, 0.0, /*is_causal=*/true);
#else
    if (!hidden.defined()) hidden = at::ones({kTokens, kTokens}, at::kBool).triu(1);
    auto scores = at::matmul(q, k.transpose(-2, -1)) * (1 / std::sqrt(double{kWidth / kHeads}));
    scores = scores.masked_fill(hidden, -std::numeric_limits<double>::infinity());
    const auto y = at::matmul(scores.softmax(-1), v);
#endif
    return c_proj(y.transpose(1, 2).contiguous().view(x.sizes()));
  }

  torch::nn::Linear c_attn{kWidth, 3 * kWidth}, c_proj{kWidth, kWidth};
  at::Tensor hidden;  // what a token does not see
};
TORCH_MODULE(TorchAttention);

struct TorchBlockImpl : torch::nn::Module {
  TorchBlockImpl() {
    register_module("ln_1", ln_1);
    register_module("attn", attn);
    register_module("ln_2", ln_2);
    register_module("mlp", mlp);
  }

  at::Tensor forward(const at::Tensor& x) {
    const auto y = x + attn(ln_1(x));
    return y + mlp->forward(ln_2(y));
  }

  torch::nn::LayerNorm ln_1{torch::nn::LayerNormOptions({kWidth})};
  TorchAttention attn;
  torch::nn::LayerNorm ln_2{torch::nn::LayerNormOptions({kWidth})};
  torch::nn::Sequential mlp{torch::nn::Linear(kWidth, 4 * kWidth),
                            torch::nn::GELU(torch::nn::GELUOptions().approximate("tanh")),
                            torch::nn::Linear(4 * kWidth, kWidth)};
};
TORCH_MODULE(TorchBlock);

struct TorchGptImpl : torch::nn::Module {
  TorchGptImpl() {
    register_module("wte", wte);
    register_module("wpe", wpe);
    for (int layer = 0; layer < kLayers; ++layer) blocks->push_back(TorchBlock());
    register_module("h", blocks);
    register_module("ln_f", ln_f);
    const torch::NoGradGuard no_grad;
    for (auto& parameter : parameters())
      if (parameter.dim() == 2) parameter.normal_(0, 0.02);
  }

  // The mean loss of targets, which are [batch, length] as tokens are.
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& targets) {
    auto x = wte(tokens) + wpe(at::arange(tokens.size(1)));
    x = ln_f(blocks->forward(x));
    const auto logits = torch::nn::functional::linear(x, wte->weight);
    return torch::nn::functional::cross_entropy(logits.view({-1, kVocabulary}), targets.view(-1));
  }

  torch::nn::Embedding wte{kVocabulary, kWidth}, wpe{kTokens, kWidth};
  torch::nn::Sequential blocks;
  torch::nn::LayerNorm ln_f{torch::nn::LayerNormOptions({kWidth})};
};
TORCH_MODULE(TorchGpt);

}  // namespace lockstep::bench
