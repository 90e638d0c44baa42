#include <lockstep/models/make_model.h>

#include <lockstep/base/error.h>
#include <lockstep/models/gpt.h>
#include <lockstep/models/llama.h>

namespace lockstep::models {

std::shared_ptr<LanguageModel> make_model(const ModelConfig& config, std::uint64_t seed) {
  switch (config.family) {
    case Family::gpt2: return std::make_shared<Gpt>(config, seed);
    case Family::llama: return std::make_shared<Llama>(config, seed);
  }
  throw UsageError("there is no model family {}", static_cast<int>(config.family));
}

}  // namespace lockstep::models
