// Which known word a mistyped one was meant to be.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace lockstep {

// ": did you mean 'run'?", or nothing where no word is near enough to be meant.
std::string did_you_mean(std::string_view word, std::span<const std::string_view> known);

}  // namespace lockstep
