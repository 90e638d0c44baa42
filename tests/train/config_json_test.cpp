#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/train/config/json_tree.h>
#include "tests/base/errors.h"

namespace lockstep::train {

namespace {

using ::testing::EndsWith;

std::string syntax_error(const std::string& text) {
  return usage_error([&] { parse_json(text, "gpt.json"); });
}

std::string override_error(const std::string& assignment) {
  JsonNode root = parse_json(R"({"seed": 1, "model": {"hidden_size": 8}})", "gpt.json");
  return usage_error([&] { apply_override(root, assignment); });
}

JsonNode overridden(const std::string& assignment) {
  JsonNode root =
      parse_json(R"({"seed": 1, "model": {"hidden_size": 8}, "data": null})", "gpt.json");
  apply_override(root, assignment);
  return root;
}

}  // namespace

TEST(JsonTree, keeps_the_line_of_each_key) {
  const JsonNode root =
      parse_json("{\n\"a\": 1,\n\"b\": {\n\"c\":\n\n[2,\n3], \"d\": 4\n}}", "gpt.json");
  EXPECT_EQ(root.find("a")->line, 2);
  EXPECT_EQ(root.find("b")->line, 3);
  EXPECT_EQ(root.nearest("b.c").line, 4);
  EXPECT_EQ(root.nearest("b.c[1]").line, 4);
  EXPECT_EQ(root.nearest("b.d").line, 7);
  EXPECT_EQ(root.nearest("b.nothing.here").line, 3) << "of the section where it would be";
  EXPECT_EQ(root.nearest("nothing").line, 0);
}

TEST(JsonTree, reads_every_kind_of_value) {
  const JsonNode root = parse_json(
      R"({"a": -3, "b": 0.5, "c": true, "d": null, "e": "auto", "f": "x", "g": 18446744073709551615})",
      "gpt.json");
  EXPECT_EQ(std::get<std::int64_t>(root.find("a")->value), -3);
  EXPECT_EQ(std::get<double>(root.find("b")->value), 0.5);
  EXPECT_TRUE(std::get<bool>(root.find("c")->value));
  EXPECT_TRUE(root.find("d")->is_default());
  EXPECT_TRUE(root.find("e")->is_default());
  EXPECT_FALSE(root.find("f")->is_default());
  EXPECT_EQ(std::get<double>(root.find("g")->value), 18446744073709551615.0);
}

TEST(JsonTree, allows_comments) {
  const JsonNode root = parse_json("// first\n{\"a\": /* two\nlines */ 1, // rest\n\"b\": 2}", "x");
  EXPECT_EQ(root.find("b")->line, 4);
}

TEST(JsonTree, says_where_the_syntax_is_wrong_and_what_may_have_been_meant) {
  EXPECT_EQ(syntax_error("{\"a\": 1,\n  \"b\": 2,\n}"),
            "gpt.json:3:1: not valid JSON: syntax error while parsing object key - unexpected '}'; "
            "expected string literal (remove the comma before it)");
  EXPECT_THAT(syntax_error("{\"a\": 1\n\"b\": 2}"), EndsWith("(is a comma missing before it?)"));
  EXPECT_THAT(syntax_error("{'a': 1}"), EndsWith("(texts stand in double quotes)"));
  EXPECT_THAT(syntax_error("{\"a\": {\"b\": 1}"),
              EndsWith("(the file ends too early: is a closing '}' missing?)"));
  EXPECT_EQ(syntax_error("{\"a\": 1e999}"),
            "gpt.json:1:11: not valid JSON: number overflow parsing '1e999'");
}

TEST(JsonTree, refuses_a_key_given_twice) {
  EXPECT_EQ(syntax_error("{\"seed\": 1,\n \"a\": {\"seed\": 3},\n \"seed\": 2}"),
            "gpt.json:3: the key 'seed' is given twice, first in line 1: remove one of them");
}

TEST(JsonTree, refuses_what_is_no_config_at_all) {
  EXPECT_EQ(syntax_error("[1]"), "gpt.json: a config is a JSON object, {...}");
  EXPECT_EQ(syntax_error("5"), "gpt.json: a config is a JSON object, {...}");
  EXPECT_EQ(syntax_error(" \n"),
            "gpt.json is empty: a config is a JSON object, as docs/config.md describes");
  EXPECT_EQ(syntax_error(std::string((1 << 20) + 1, ' ')),
            "gpt.json has 1048577 bytes; a config has at most 1048576: is it the right file?");
}

TEST(JsonTree, takes_no_more_memory_than_a_config_needs) {
  std::string deep;
  for (int i = 0; i < 17; ++i) deep += "{\"a\":";
  EXPECT_EQ(syntax_error(deep), "gpt.json:1: nested deeper than the 16 levels a config may have");
  std::string many = "{\"a\": [";
  for (int i = 0; i < 10'000; ++i) many += "1,";
  EXPECT_EQ(syntax_error(many + "1]}"),
            "gpt.json:1: more than 10000 values: this is no config of Lockstep's");
}

TEST(Override, replaces_a_value_and_makes_sections) {
  EXPECT_EQ(std::get<std::int64_t>(overridden("seed=7").find("seed")->value), 7);
  EXPECT_EQ(
      std::get<double>(overridden("optimizer.params.lr=3e-4").nearest("optimizer.params.lr").value),
      3e-4);
  EXPECT_EQ(*overridden("data.train=a=b.txt").nearest("data.train").text(), "a=b.txt");
  EXPECT_EQ(overridden("data.train=[\"a\", \"b\"]").nearest("data.train").list()->size(), 2u);
  const JsonNode root = overridden("model.hidden_size=16");
  EXPECT_EQ(root.nearest("model.hidden_size").flag, "--set model.hidden_size=16");
  EXPECT_EQ(root.nearest("model").line, 1) << "the section around it is the file's";
}

TEST(Override, is_a_text_where_it_is_no_json) {
  EXPECT_EQ(*overridden("device=cpu").find("device")->text(), "cpu");
  EXPECT_EQ(*overridden("device=").find("device")->text(), "");
  EXPECT_EQ(*overridden("device=1, \"b\": 2").find("device")->text(), "1, \"b\": 2");
}

TEST(Override, names_the_flag_in_what_is_wrong_with_it) {
  EXPECT_EQ(override_error("seed"),
            "--set seed: it must be <key>=<value>, for example --set optimizer.params.lr=3e-4");
  EXPECT_EQ(override_error("model..x=1"),
            "--set model..x=1: the part before '=' must be a key, with a dot between a section and "
            "what is in it, for example --set optimizer.params.lr=3e-4");
  EXPECT_EQ(override_error("seed.x=1"),
            "--set seed.x=1: 'x' cannot be set, because the config has 1 where its section would "
            "be");
  EXPECT_EQ(override_error("data.train=[a.txt]"),
            "--set data.train=[a.txt]: the value is not valid JSON; in a shell, put it in single "
            "quotes, for example --set 'data.train=[\"a.txt\", \"b.txt\"]'");
  EXPECT_EQ(override_error("output=\xff"), "--set output=?: the value is no UTF-8 text");
}

}  // namespace lockstep::train
