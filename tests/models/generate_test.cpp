#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <numeric>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/models/generate.h>
#include <lockstep/models/make_model.h>
#include <lockstep/nn/layers/random.h>

#include "../base/errors.h"
#include "configs.h"

namespace lockstep::models {
namespace {

const std::vector<float> kScores = {0.0f, 2.0f, 1.0f, 2.0f, -1.0f};

TEST(ChooseToken, TakesTheLikeliestAtZero) {
  for (std::uint64_t index = 0; index < 20; ++index)
    EXPECT_EQ(choose_token(kScores, {.temperature = 0}, index), 1);
}

std::map<std::int64_t, double> shares(const SamplingOptions& options) {
  constexpr int kDraws = 20'000;
  std::map<std::int64_t, double> counts;
  for (int i = 0; i < kDraws; ++i)
    counts[choose_token(kScores, options, static_cast<std::uint64_t>(i))] += 1.0 / kDraws;
  return counts;
}

TEST(ChooseToken, FollowsTheSoftmax) {
  const double temperature = 0.7;
  auto found = shares({.temperature = temperature, .seed = 9});
  double sum = 0;
  for (const float score : kScores) sum += std::exp(score / temperature);
  for (std::size_t i = 0; i < kScores.size(); ++i)
    EXPECT_NEAR(found[static_cast<std::int64_t>(i)], std::exp(kScores[i] / temperature) / sum,
                0.01);
}

TEST(ChooseToken, KeepsToTheTop) {
  auto found = shares({.top_k = 3});
  EXPECT_EQ(found.size(), 3u);
  const double sum = 2 + std::exp(-1.0);
  EXPECT_NEAR(found[1], 1 / sum, 0.01);
  EXPECT_NEAR(found[3], 1 / sum, 0.01);
  EXPECT_NEAR(found[2], std::exp(-1.0) / sum, 0.01);
  // The two best scores are equal, so the first token is chosen.
  EXPECT_EQ(shares({.top_k = 1}), shares({.temperature = 0}));
  EXPECT_EQ(shares({.top_k = 100}), shares({}));
}

TEST(ChooseToken, DependsOnTheSeed) {
  const auto text = [](std::uint64_t seed) {
    std::vector<std::int64_t> tokens;
    for (std::uint64_t i = 0; i < 50; ++i)
      tokens.push_back(choose_token(kScores, {.seed = seed}, i));
    return tokens;
  };
  EXPECT_EQ(text(1), text(1));
  EXPECT_NE(text(1), text(2));
}

TEST(ChooseToken, RefusesWhatMakesNoSense) {
  constexpr auto kNan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> broken = {0.0f, kNan};
  const auto message = usage_error([&] { choose_token(broken, {}, 0); });
  EXPECT_NE(message.find("token 1"), std::string::npos) << message;
  usage_error([] { choose_token(kScores, {.temperature = -1}, 0); });
  usage_error([] { choose_token(kScores, {.temperature = kNan}, 0); });
  usage_error([] { choose_token(kScores, {.top_k = -1}, 0); });
}

class Generate : public testing::TestWithParam<ModelConfig> {
 protected:
  // These weights make earlier tokens matter.
  Generate() : model_(make_model(GetParam(), 1)) {
    for (const auto& item : model_->named_parameters())
      if (item.value().dim() == 2) nn::fill_normal(item.value(), 5, item.key(), 0.3);
  }

  // The likeliest token after a text, computed without a cache.
  std::int64_t next(const std::vector<std::int64_t>& text) {
    const c10::NoGradGuard no_grad;
    model_->eval();
    const auto logits = model_->logits(at::tensor(text, at::kLong).unsqueeze(0));
    return logits[0][-1].argmax().item<std::int64_t>();
  }

  std::shared_ptr<LanguageModel> model_;
};

INSTANTIATE_TEST_SUITE_P(Models, Generate, testing::ValuesIn(small_models()),
                         [](const auto& test) { return family_of(test.param); });

TEST_P(Generate, SaysWhatTheWholeForwardWould) {
  std::vector<std::int64_t> text = {3, 1, 4, 1, 5};
  const auto said = generate(*model_, text, {.max_new_tokens = 15, .sampling = {.temperature = 0}});
  ASSERT_EQ(said.size(), 15u);
  for (const auto token : said) {
    EXPECT_EQ(token, next(text));
    text.push_back(token);
  }
}

// There are 20 positions: after those, the model sees the last 10 tokens, then 11, and so on.
TEST_P(Generate, GoesOnBeyondItsPositions) {
  std::vector<std::int64_t> text(18);
  std::iota(text.begin(), text.end(), 2);
  const auto said = generate(*model_, text, {.max_new_tokens = 30, .sampling = {.temperature = 0}});
  ASSERT_EQ(said.size(), 30u);
  std::vector<std::int64_t> seen = text;
  for (const auto token : said) {
    EXPECT_EQ(token, next(seen));
    seen.push_back(token);
    if (seen.size() > 20) seen.erase(seen.begin(), seen.end() - 10);
  }
  // If a prompt is too long, only its end is read.
  std::vector<std::int64_t> longer(15, 30);
  longer.insert(longer.end(), text.begin(), text.end());
  const std::vector<std::int64_t> end(longer.end() - 20, longer.end());
  EXPECT_EQ(generate(*model_, longer, {.max_new_tokens = 5}),
            generate(*model_, end, {.max_new_tokens = 5}));
}

TEST_P(Generate, IsDeterminedByTheSeed) {
  const std::vector<std::int64_t> prompt = {1, 2};
  const auto with = [&](std::uint64_t seed) {
    return generate(*model_, prompt, {.max_new_tokens = 18, .sampling = {.seed = seed}});
  };
  EXPECT_EQ(with(1), with(1));
  EXPECT_NE(with(1), with(2));
}

TEST_P(Generate, StopsWhereItIsTold) {
  const std::vector<std::int64_t> prompt = {1, 2};
  const auto all = generate(*model_, prompt, {.max_new_tokens = 18});
  std::vector<std::int64_t> heard;
  const auto said = generate(*model_, prompt, {.max_new_tokens = 18, .stop_token = all[7]},
                             [&](std::int64_t token) { heard.push_back(token); });
  EXPECT_EQ(said.back(), all[7]);
  EXPECT_LE(said.size(), 8u);
  EXPECT_EQ(heard, said);
  EXPECT_TRUE(generate(*model_, prompt, {.max_new_tokens = 0}).empty());
}

TEST_P(Generate, LeavesTheModelInItsMode) {
  const std::vector<std::int64_t> prompt = {1};
  model_->train();
  generate(*model_, prompt, {.max_new_tokens = 1});
  EXPECT_TRUE(model_->is_training());
  model_->eval();
  generate(*model_, prompt, {.max_new_tokens = 1});
  EXPECT_FALSE(model_->is_training());
}

TEST_P(Generate, RefusesPromptsItCannotRead) {
  usage_error([&] { generate(*model_, std::vector<std::int64_t>{}, {}); });
  const auto message = usage_error([&] {
    generate(*model_, std::vector<std::int64_t>{1, 37}, {});
  });
  EXPECT_NE(message.find("token 37"), std::string::npos) << message;
  EXPECT_NE(message.find("37 tokens"), std::string::npos) << message;
}

}  // namespace
}  // namespace lockstep::models
