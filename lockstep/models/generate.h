// Generates text from a model, token by token.
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
  std::int64_t top_k = 0;    // choose among this many of the likeliest; 0: among all
  std::uint64_t seed = 0;
};

struct GenerateOptions {
  std::int64_t max_new_tokens = 256;
  SamplingOptions sampling;
  std::optional<std::int64_t> stop_token;  // generating ends with this token
};

// Chooses a token by the scores of all tokens, as the options say. `index` numbers the choices in a
// text: the same seed and index choose alike. Of equal scores the first counts as likelier.
// UsageError if a score is not a number, or the options make no sense.
std::int64_t choose_token(std::span<const float> scores, const SamplingOptions& options,
                          std::uint64_t index);

// Returns the tokens that the model generates after a prompt, without the prompt; `on_token` gets
// each one as it comes. Evaluates the model without dropout and leaves it in its former mode. When
// the text outgrows the model's positions, the model goes on from the later half of what it has
// read. UsageError for a prompt that is empty or has tokens outside the vocabulary.
std::vector<std::int64_t> generate(LanguageModel& model, std::span<const std::int64_t> prompt,
                                   const GenerateOptions& options,
                                   const std::function<void(std::int64_t)>& on_token = {});

}  // namespace lockstep::models
