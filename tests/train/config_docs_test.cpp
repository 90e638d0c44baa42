// docs/config.md is what users write configs by: its example is one, and it has every key.
#include <gtest/gtest.h>

#include "tests/base/files.h"
#include "tests/train/configs.h"

namespace lockstep::train {

namespace {

using nlohmann::json;

std::string documentation() { return lockstep::testing::read_file(LOCKSTEP_DOCS "/config.md"); }

// Every key as the tables have it; parameters of schedules stand by themselves.
void expect_documented(const json& section, const std::string& path, const std::string& text) {
  for (const auto& [key, value] : section.items()) {
    const bool schedule = path == "scheduler.params.";
    if (value.is_object())
      expect_documented(value, path + key + ".", text);
    else
      EXPECT_NE(text.find("`" + (schedule ? "" : path) + key + "`"), std::string::npos)
          << path + key << " is not in docs/config.md";
  }
}

}  // namespace

TEST(ConfigDocs, have_every_key) {
  const std::string text = documentation();
  const auto check = [&](std::initializer_list<Change> changes) {
    expect_documented(json::parse(to_json(config_with(changes))), "", text);
  };
  check({{"/model/family", "llama"}, {"/data/validation", "v.txt"}});
  check({{"/model", {{"from", "gpt2"}}}, {"/optimizer/type", "SGD"}});
  for (const char* type : {"WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "LRRangeTest"})
    check({{"/max_steps", 2000}, {"/scheduler/type", type}});
  check({{"/scheduler/type", "OneCycle"},
         {"/scheduler/params/cycle_min_lr", 0.1},
         {"/scheduler/params/cycle_max_lr", 0.2}});
}

TEST(ConfigDocs, have_an_example_that_is_a_config) {
  const std::string text = documentation();
  const std::string fence = "```json\n";
  const auto begin = text.find(fence);
  ASSERT_NE(begin, std::string::npos);
  const auto start = begin + fence.size();
  const TrainConfig config =
      parse_config(text.substr(start, text.find("```", start) - start), {.name = "docs"});
  EXPECT_EQ(config.model.hidden_size, 384);
}

}  // namespace lockstep::train
