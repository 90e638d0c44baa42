// Patterns that stand for names of layers in a model.
#pragma once

#include <string_view>

namespace lockstep::nn {

// "*" stands for any run of characters without a dot. The model itself, whose name is empty, is no
// layer of its own: only the empty pattern means it.
bool matches_layer(std::string_view pattern, std::string_view name);

}  // namespace lockstep::nn
