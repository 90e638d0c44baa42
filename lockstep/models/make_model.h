// Makes a model of the family that a config names.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include <lockstep/models/language_model.h>
#include <lockstep/models/spec/family.h>

namespace lockstep::models {

// Makes a model on the CPU, in float, in training mode. The weights, and later the dropout, are a
// function of the seed: the same on every rank and in every layout. UsageError for a config that
// makes no sense, and for a family whose module and list of layers differ.
std::shared_ptr<LanguageModel> make_model(const ModelConfig& config, std::uint64_t seed);

// Makes a module whose weights are uninitialised memory. Every default of the config is filled in.
using ModelMaker =
    std::function<std::shared_ptr<LanguageModel>(const ModelConfig& config, std::uint64_t seed)>;

// Adds a family of the program's own, which configs can then name. Call it on every rank, before
// the first config is read. UsageError if the name is taken, or something is missing. Any thread
// may call it.
void register_family(Family family, ModelMaker make);

}  // namespace lockstep::models
