#include <lockstep/distributed/outcome.h>

#include <exception>

#include <lockstep/checkpoint/format/manifest.h>

namespace lockstep {

Outcome outcome_of(const std::function<std::string()>& work) {
  try {
    return {.kind = Outcome::Kind::done, .text = work()};
  } catch (const checkpoint::DamagedCheckpoint& damage) {
    return {.kind = Outcome::Kind::found_damage, .text = damage.what()};
  } catch (const std::exception& error) {
    return {.kind = Outcome::Kind::failed, .text = error.what()};
  }
}

std::vector<Outcome> tell_all(const RankMessages& ranks, const Outcome& mine) {
  std::vector<Outcome> all;
  for (const std::string& one : ranks.gather(static_cast<char>(mine.kind) + mine.text))
    all.push_back({.kind = static_cast<Outcome::Kind>(one.front()), .text = one.substr(1)});
  return all;
}

}  // namespace lockstep
