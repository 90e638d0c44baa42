#include <lockstep/models/generate.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/base/error.h>
#include <lockstep/base/philox.h>
#include <lockstep/nn/layers/random.h>

namespace lockstep::models {

namespace {

void check(const SamplingOptions& options) {
  if (!(options.temperature >= 0) || std::isinf(options.temperature))
    throw UsageError("the temperature is {}: give 0 for the likeliest token, or a positive number",
                     options.temperature);
  if (options.top_k < 0)
    throw UsageError("top_k is {}: give how many tokens to choose among, or 0 for all",
                     options.top_k);
}

// Puts a model into evaluation mode, and back into its former mode.
class Evaluation {
 public:
  explicit Evaluation(LanguageModel& model) : model_(model), training_(model.is_training()) {
    model.eval();
  }
  ~Evaluation() { model_.train(training_); }
  Evaluation(const Evaluation&) = delete;
  Evaluation& operator=(const Evaluation&) = delete;

 private:
  LanguageModel& model_;
  bool training_;
};

// Feeds a text to the model and keeps the model's cache of it.
class Reader {
 public:
  explicit Reader(LanguageModel& model)
      : model_(model), positions_(model.config().max_positions), cache_(positions_) {}

  // Reads more tokens and returns the scores of the token that follows them.
  std::vector<float> read(std::vector<std::int64_t> tokens) {
    seen_.insert(seen_.end(), tokens.begin(), tokens.end());
    const auto size = static_cast<std::int64_t>(tokens.size());
    if (cache_.length() + size > positions_) {
      // The window moves, so every position changes and the cache is useless. Keeping only half of
      // the tokens makes the next ones cheap again.
      const std::int64_t kept =
          cache_.length() == 0 ? positions_ : std::max<std::int64_t>(positions_ / 2, 1);
      seen_.erase(seen_.begin(), seen_.end() - kept);
      tokens = seen_;
      cache_ = KeyValueCache(positions_);
    }
    const auto device = model_.parameters().front().device();
    const auto input = at::tensor(tokens, at::kLong).unsqueeze(0).to(device);
    const auto last = model_.extend(input, cache_).select(1, -1);
    const auto scores = model_.logits_of(last).flatten().to(at::kCPU, at::kFloat).contiguous();
    const auto* data = scores.data_ptr<float>();
    return {data, data + scores.numel()};
  }

 private:
  LanguageModel& model_;
  std::int64_t positions_;
  std::vector<std::int64_t> seen_;
  KeyValueCache cache_;
};

}  // namespace

std::int64_t choose_token(std::span<const float> scores, const SamplingOptions& options,
                          std::uint64_t index) {
  check(options);
  for (std::size_t i = 0; i < scores.size(); ++i)
    if (std::isnan(scores[i]) || scores[i] == std::numeric_limits<float>::infinity())
      throw UsageError(
          "the model's score of token {} is {}: its weights are damaged, or its training diverged",
          i, scores[i]);
  const auto likelier = [&](std::int64_t a, std::int64_t b) {
    const float score_a = scores[static_cast<std::size_t>(a)];
    const float score_b = scores[static_cast<std::size_t>(b)];
    return score_a != score_b ? score_a > score_b : a < b;
  };
  std::vector<std::int64_t> tokens(scores.size());
  std::iota(tokens.begin(), tokens.end(), 0);
  const auto best = *std::min_element(tokens.begin(), tokens.end(), likelier);
  if (options.temperature == 0) return best;
  if (options.top_k > 0 && options.top_k < static_cast<std::int64_t>(tokens.size())) {
    std::nth_element(tokens.begin(), tokens.begin() + options.top_k, tokens.end(), likelier);
    tokens.resize(static_cast<std::size_t>(options.top_k));
    std::sort(tokens.begin(), tokens.end());  // nth_element's order differs between libraries
  }
  // Weights are relative to the likeliest token's, which keeps them from overflowing.
  const double most = scores[static_cast<std::size_t>(best)];
  std::vector<double> sums;
  sums.reserve(tokens.size());
  double sum = 0;
  for (const auto token : tokens) {
    const double below = scores[static_cast<std::size_t>(token)] - most;
    sums.push_back(sum += std::exp(below / options.temperature));
  }
  const auto words = Philox::words(nn::stream_key(options.seed, "generate"), index);
  const double place = words[0] * 0x1p-32 * sum;
  const auto found = std::upper_bound(sums.begin(), sums.end(), place);
  return found == sums.end() ? best : tokens[static_cast<std::size_t>(found - sums.begin())];
}

std::vector<std::int64_t> generate(LanguageModel& model, std::span<const std::int64_t> prompt,
                                   const GenerateOptions& options,
                                   const std::function<void(std::int64_t)>& on_token) {
  check(options.sampling);
  if (prompt.empty()) throw UsageError("the prompt is empty: give at least one token");
  const std::int64_t vocabulary = model.config().vocab_size;
  for (const auto token : prompt)
    if (token < 0 || token >= vocabulary)
      throw UsageError("the prompt holds token {}, and the model knows {} tokens", token,
                       vocabulary);
  const c10::NoGradGuard no_grad;
  const Evaluation evaluation(model);
  Reader reader(model);
  std::vector<std::int64_t> said;
  std::vector<std::int64_t> unread(prompt.begin(), prompt.end());
  while (static_cast<std::int64_t>(said.size()) < options.max_new_tokens) {
    const auto scores = reader.read(unread);
    const std::int64_t token = choose_token(scores, options.sampling, said.size());
    said.push_back(token);
    if (on_token) on_token(token);
    if (token == options.stop_token) break;
    unread = {token};
  }
  return said;
}

}  // namespace lockstep::models
