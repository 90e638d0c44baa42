#include <lockstep/optim/saved_state.h>

#include <algorithm>
#include <unordered_map>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>

namespace lockstep::optim {

namespace {

// A person reads the first few; the number of the others tells the rest.
constexpr std::size_t kDifferencesShown = 5;

[[noreturn]] void refuse(std::vector<std::string> differences) {
  const std::size_t more = differences.size() - std::min(differences.size(), kDifferencesShown);
  differences.resize(differences.size() - more);
  throw UsageError("the saved state is not this optimizer's: {}{}; load it with the optimizer and "
                   "the model that it was saved with",
                   fmt::join(differences, ", "),
                   more == 0 ? std::string() : fmt::format(", and {} more", more));
}

}  // namespace

std::vector<at::Tensor> match_saved_state(const std::vector<NamedTensor>& needed,
                                          const std::vector<NamedTensor>& saved) {
  std::vector<std::string> differences;
  std::unordered_map<std::string, at::Tensor> by_name;
  for (const auto& [name, tensor] : saved)
    if (!by_name.emplace(name, tensor).second)
      differences.push_back(fmt::format("'{}' is there twice", name));
  std::vector<at::Tensor> matched;
  for (const auto& [name, tensor] : needed) {
    const auto found = by_name.extract(name);
    if (!found || !found.mapped().defined()) {
      differences.push_back(fmt::format("'{}' is missing", name));
      continue;
    }
    const at::Tensor& candidate = found.mapped();
    if (candidate.sizes() != tensor.sizes() || candidate.scalar_type() != tensor.scalar_type())
      differences.push_back(fmt::format("'{}' is {} instead of {}", name, type_and_shape(candidate),
                                        type_and_shape(tensor)));
    matched.push_back(candidate);
  }
  for (const auto& [name, tensor] : saved)
    if (by_name.erase(name) != 0) differences.push_back(fmt::format("'{}' is unknown", name));
  if (!differences.empty()) refuse(std::move(differences));
  return matched;
}

}  // namespace lockstep::optim
