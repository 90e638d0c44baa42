#include <lockstep/parallel/shard/sizes/strategy.h>

#include <vector>

#include <spdlog/fmt/fmt.h>

namespace lockstep {

namespace {

static_assert(
    [] {
      for (std::size_t i = 0; i < kStrategies.size(); ++i)
        if (static_cast<std::size_t>(kStrategies[i].strategy) != i) return false;
      return true;
    }(),
    "the table has the order of the enumeration");

// "a, b or c"
std::string alternatives(const std::vector<std::string>& texts) {
  std::string list;
  for (std::size_t i = 0; i < texts.size(); ++i)
    list += (i == 0 ? "" : i + 1 == texts.size() ? " or " : ", ") + texts[i];
  return list;
}

}  // namespace

std::string strategies_that_cut(ShardedState least) {
  std::vector<std::string> names;
  for (const StrategyTraits& row : kStrategies)
    if (row.cut >= least) names.emplace_back(row.name);
  return alternatives(names);
}

std::string config_words_that_cut(ShardedState least) {
  std::vector<std::string> words;
  for (const StrategyTraits& row : kStrategies) {
    if (row.cut < least) continue;
    words.push_back(fmt::format("\"{}\"", row.name));
    if (strategy_of_stage(row.stage) == row.strategy)
      words.back() +=
          fmt::format(" ({}{})", words.size() == 1 ? "zero_optimization.stage " : "", row.stage);
  }
  return alternatives(words);
}

}  // namespace lockstep
