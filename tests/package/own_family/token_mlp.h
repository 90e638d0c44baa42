// A model family of a program's own: its blocks look at one token at a time.
#pragma once

#include <cstdint>
#include <memory>

#include <lockstep/models/language_model.h>
#include <lockstep/models/spec/family.h>

lockstep::models::Family token_mlp_family();

std::shared_ptr<lockstep::models::LanguageModel> make_token_mlp(
    const lockstep::models::ModelConfig& config, std::uint64_t seed);
