#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/checkpoint/format/manifest.h>

#include "../base/errors.h"

namespace lockstep::checkpoint {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TrainingState example() {
  return {.step = 500,
          .data = {.epoch = 2, .position = 77, .size = 1000},
          .seed = std::numeric_limits<std::uint64_t>::max(),
          .samples_seen = std::numeric_limits<std::int64_t>::max(),
          .last_loss = 0.1,
          .values = {{"loss_scale", 65536.0}},
          .config = "{\"lr\": 1e-3,\n \"name\": \"tëst\"}"};
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const auto at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

std::string error(const std::string& text) {
  return usage_error([&] { parse_state(text, "state 'file'"); });
}

TEST(TrainingState, ComesBackAsItWas) {
  EXPECT_EQ(parse_state(to_text(example()), "state"), example());
  EXPECT_EQ(parse_state(to_text(TrainingState()), "state"), TrainingState());
}

TEST(TrainingState, EveryDoubleComesBackToTheBit) {
  std::vector<std::uint64_t> patterns = {
      std::bit_cast<std::uint64_t>(0.1),
      std::bit_cast<std::uint64_t>(-0.0),
      std::bit_cast<std::uint64_t>(std::numeric_limits<double>::denorm_min()),
      std::bit_cast<std::uint64_t>(std::numeric_limits<double>::max()),
      std::bit_cast<std::uint64_t>(std::numeric_limits<double>::infinity()),
      std::bit_cast<std::uint64_t>(-std::numeric_limits<double>::infinity()),
      0x7ff8000000000000,
      0xfff8000000000001,
      0x7ff4dead00000000,
  };
  std::mt19937_64 random(3);
  for (int i = 0; i < 2000; ++i) patterns.push_back(random());
  TrainingState state;
  for (const std::uint64_t bits : patterns)
    state.values[std::to_string(bits)] = std::bit_cast<double>(bits);
  state.last_loss = std::bit_cast<double>(patterns[6]);
  const TrainingState read = parse_state(to_text(state), "state");
  ASSERT_EQ(read.values.size(), state.values.size());
  for (const auto& [name, value] : read.values)
    EXPECT_EQ(std::to_string(std::bit_cast<std::uint64_t>(value)), name);
  EXPECT_EQ(std::bit_cast<std::uint64_t>(read.last_loss.value()), patterns[6]);
  state.last_loss.reset();
  EXPECT_EQ(parse_state(to_text(state), "state").last_loss, std::nullopt);
}

TEST(TrainingState, EachMissingKeyIsNamed) {
  const std::string text = to_text(example());
  for (const char* key : {"step", "data", "epoch", "position", "size", "seed", "samples_seen",
                          "last_loss", "values", "config"}) {
    const std::string quoted_key = fmt::format("\"{}\":", key);
    EXPECT_THAT(
        error(replaced(text, quoted_key, "\"other\":")),
        AllOf(HasSubstr("state 'file'"), HasSubstr(fmt::format("the key '{}' is missing", key))));
  }
}

TEST(TrainingState, WhatIsOfAnotherFormIsRefused) {
  const std::string text = to_text(example());
  const auto with = [&](const char* from, const char* to) {
    return error(replaced(text, from, to));
  };
  EXPECT_THAT(with("\"step\":500", "\"step\":-1"), HasSubstr("'step': not a whole number from 0"));
  EXPECT_THAT(with("\"step\":500", "\"step\":5.5"), HasSubstr("'step': not a whole number"));
  EXPECT_THAT(with("\"position\":77", "\"position\":9223372036854775808"),
              HasSubstr("'data.position'"));
  EXPECT_THAT(with("\"last_loss\":0.1", "\"last_loss\":\"3ff0000000000000\""),
              HasSubstr("'last_loss': '3ff0000000000000' is not a number"));
  EXPECT_THAT(with("\"last_loss\":0.1", "\"last_loss\":\"nan\""), HasSubstr("'nan' is not"));
  EXPECT_THAT(with("65536.0", "true"), HasSubstr("'values.loss_scale': not a text"));
  EXPECT_THAT(with("\"step\":500", "\"step\":500, \"step\":500"),
              HasSubstr("'step' is there twice"));
  EXPECT_THAT(error(text.substr(0, text.size() / 2)), HasSubstr("not valid JSON"));
  EXPECT_THAT(error(""), HasSubstr("not valid JSON"));
}

TEST(TrainingState, TextsThatAreNoUtf8AreRefused) {
  TrainingState state;
  state.config = "\xff";
  EXPECT_THAT(usage_error([&] { to_text(state); }), HasSubstr("not UTF-8"));
}

}  // namespace
}  // namespace lockstep::checkpoint
