// Text from a model, token by token.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include <lockstep/models/language_model.h>

namespace lockstep::models {

struct SamplingOptions {
  double temperature = 1.0;  // 0: always the likeliest token
  std::int64_t top_k = 0;    // only among so many of the likeliest; 0: among all
  std::uint64_t seed = 0;
};

struct GenerateOptions {
  std::int64_t max_new_tokens = 256;
  SamplingOptions sampling;
  std::optional<std::int64_t> stop_token;  // the last token, where the model says it
};

// The token that the options choose by the scores of all. `index` numbers the choices of a text:
// the same seed and index choose alike. Of equal scores the first counts as likelier. UsageError
// where a score is not a number, or the options make no sense.
std::int64_t choose_token(std::span<const float> scores, const SamplingOptions& options,
                          std::uint64_t index);

// The tokens that the model says after a prompt, without it; `on_token` sees each as it comes.
// Evaluates the model without dropout and leaves it in the mode it was in. When the text outgrows
// the model's positions, the model goes on from the later half of what it saw. UsageError for a
// prompt that is empty or holds tokens that the model does not know.
std::vector<std::int64_t> generate(LanguageModel& model, std::span<const std::int64_t> prompt,
                                   const GenerateOptions& options,
                                   const std::function<void(std::int64_t)>& on_token = {});

}  // namespace lockstep::models
