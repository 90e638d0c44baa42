// Texts for people: large numbers as they are said, and which known word a mistyped one was meant
// to be.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace lockstep {

// The known word; empty where none is near enough to be meant.
std::string_view nearest_word(std::string_view word, std::span<const std::string_view> known);

// ": did you mean 'run'?", or nothing where no word is near enough to be meant.
std::string did_you_mean(std::string_view word, std::span<const std::string_view> known);

// "7.00 B", "124.4 M", "12.5 k", "512".
std::string count_text(double count);

}  // namespace lockstep
