// docs/config.md is how users learn to write configs: its example is valid, and it has every key.
#include <gtest/gtest.h>

#include "tests/base/files.h"
#include "tests/train/configs.h"

namespace lockstep::train {

namespace {

using nlohmann::json;

std::string documentation() { return lockstep::testing::read_file(LOCKSTEP_DOCS "/config.md"); }

}  // namespace

// The tables come from the keys' declarations: lockstep/train/config/describe.cpp.
TEST(ConfigDocs, have_every_key) {
  const std::string text = documentation();
  for (const auto& [heading, rows] : key_tables())
    EXPECT_NE(text.find(rows), std::string::npos)
        << "docs/config.md should have, under " << heading << ":\n"
        << rows;
}

TEST(ConfigSchema, has_what_a_config_has) {
  const json schema = json::parse(config_schema());
  const auto check = [](const auto& self, const json& value, const json& described,
                        const std::string& path) -> void {
    for (const auto& [key, inside] : value.items()) {
      ASSERT_TRUE(described["properties"].contains(key)) << path + key;
      const json& one = described["properties"][key];
      if (inside.is_object())
        self(self, inside, one, path + key + ".");
      else
        EXPECT_TRUE(one.contains("description")) << path + key;
    }
  };
  for (const char* type : {"WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "LRRangeTest"})
    check(check,
          json::parse(to_json(config_with(
              {{"/max_steps", 2000}, {"/scheduler/type", type}, {"/model/family", "llama"}}))),
          schema, "");
  EXPECT_EQ(schema["additionalProperties"], false);
  EXPECT_EQ(schema["required"], json::parse(R"(["data", "model", "optimizer"])"));
  EXPECT_EQ(schema["properties"]["checkpoint"]["properties"]["interval"]["default"], 1000);
  const json& stage = schema["properties"]["zero_optimization"]["properties"]["stage"];
  EXPECT_EQ(stage["anyOf"][0]["maximum"], 3);
  EXPECT_TRUE(schema["properties"]["zero_optimization"]["properties"].contains(
      "stage3_max_live_parameters"));
  // Editors name the schema in the config itself.
  EXPECT_EQ(schema["properties"]["$schema"]["anyOf"][0]["type"], "string");
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
