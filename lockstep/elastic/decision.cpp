#include <lockstep/elastic/decision.h>

#include <utility>

#include <lockstep/base/error.h>

namespace lockstep::elastic {

namespace {

constexpr std::pair<Decision::Action, const char*> kActions[] = {
    {Decision::Action::end, "end"},
    {Decision::Action::restart, "restart"},
    {Decision::Action::grow, "grow"},
};

}  // namespace

std::string Decision::encode() const {
  for (const auto& [known, name] : kActions)
    if (known == action) return fmt::format("{} {}", name, failure ? failure->encode() : reason);
  LOCKSTEP_CHECK(false, "no such action");
}

Decision Decision::decode(const std::string& text) {
  const auto space = text.find(' ');
  const std::string word = text.substr(0, space);
  const std::string rest = space == std::string::npos ? "" : text.substr(space + 1);
  for (const auto& [known, name] : kActions) {
    if (word != name) continue;
    if (known == Action::grow) return {known, std::nullopt, rest};
    return {known, Failure::decode(rest), ""};
  }
  throw UsageError(
      "node 0 decided '{}', which this launcher does not know: use the same version of "
      "lockstep on every host",
      word);
}

}  // namespace lockstep::elastic
