// Patterns that stand for names of layers in a model.
#pragma once

#include <string_view>

namespace lockstep::nn {

// "*" stands for any run of characters without a dot.
bool matches_layer(std::string_view pattern, std::string_view name);

}  // namespace lockstep::nn
