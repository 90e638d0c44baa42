#include <lockstep/nn/layer_names.h>

namespace lockstep::nn {

namespace {

bool matches_rest(std::string_view pattern, std::string_view name) {
  if (pattern.empty()) return name.empty();
  if (pattern.front() != '*')
    return !name.empty() && pattern.front() == name.front() &&
           matches_rest(pattern.substr(1), name.substr(1));
  if (matches_rest(pattern.substr(1), name)) return true;
  return !name.empty() && name.front() != '.' && matches_rest(pattern, name.substr(1));
}

}  // namespace

bool matches_layer(std::string_view pattern, std::string_view name) {
  return name.empty() ? pattern.empty() : matches_rest(pattern, name);
}

}  // namespace lockstep::nn
