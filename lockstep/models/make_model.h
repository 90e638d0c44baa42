// A model of whichever family a config names.
#pragma once

#include <cstdint>
#include <memory>

#include <lockstep/models/language_model.h>

namespace lockstep::models {

// On the CPU, in float, in training mode. The weights, and later the dropout, are a function of the
// seed: the same on every rank and in every layout. UsageError for a config that makes no sense.
std::shared_ptr<LanguageModel> make_model(const ModelConfig& config, std::uint64_t seed);

}  // namespace lockstep::models
