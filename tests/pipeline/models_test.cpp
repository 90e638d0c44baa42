// Our own models, without and with recomputation.
#include <lockstep/models/make_model.h>
#include <lockstep/recompute/wrap_activation_checkpointing.h>
#include <torch/nn/functional/loss.h>

#include "two_halves.h"

namespace lockstep::pipeline {
namespace {

using models::LanguageModel;

models::ModelConfig small(const std::string& family, bool tied) {
  return {.family = family,
          .vocab_size = 31,
          .hidden_size = 16,
          .num_layers = 2,
          .num_heads = 4,
          .num_kv_heads = models::family_named(family).grouped_queries ? 2 : 0,
          .max_positions = 12,
          .tie_embeddings = tied,
          .dropout = 0.1};
}

Case<LanguageModel> trained(models::ModelConfig config) {
  return {[=] { return models::make_model(config, 7); },
          [] {
            return at::randint(0, 31, {3, 9});
          },
          [](LanguageModel& model, const at::Tensor& tokens) {
            model.set_random_position(2, {0, 1, 2});
            return model.loss(tokens, tokens.roll(1, 1)).sum;
          }};
}

TEST(SplitModels, EachFamily) {
  for (const char* family : {"gpt2", "llama", "qwen2"})
    for (const bool tied : {true, false}) expect_halves_make_a_whole(trained(small(family, tied)));
}

// The head is a product like any other, and its weight is the embedding's.
TEST(SplitModels, LogitsOfATiedHead) {
  auto given = trained(small("gpt2", true));
  given.loss = [](LanguageModel& model, const at::Tensor& tokens) {
    model.set_random_position(2, {0, 1, 2});
    return torch::nn::functional::cross_entropy(model.logits(tokens).view({-1, 31}),
                                                tokens.roll(1, 1).view({-1}));
  };
  expect_halves_make_a_whole(given);
}

TEST(SplitModels, RecomputedBlocks) {
  for (const char* family : {"gpt2", "llama", "qwen2"}) {
    auto given = trained(small(family, true));
    given.make = [make = given.make] {
      auto model = make();
      SelectiveGradientCheckpointing(*model, 1.0);
      return model;
    };
    expect_halves_make_a_whole(given);
  }
}

}  // namespace
}  // namespace lockstep::pipeline
