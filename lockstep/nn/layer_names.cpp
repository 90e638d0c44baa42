#include <lockstep/nn/layer_names.h>

namespace lockstep::nn {

bool matches_layer(std::string_view pattern, std::string_view name) {
  if (pattern.empty()) return name.empty();
  if (pattern.front() != '*')
    return !name.empty() && pattern.front() == name.front() &&
           matches_layer(pattern.substr(1), name.substr(1));
  if (matches_layer(pattern.substr(1), name)) return true;
  return !name.empty() && name.front() != '.' && matches_layer(pattern, name.substr(1));
}

}  // namespace lockstep::nn
