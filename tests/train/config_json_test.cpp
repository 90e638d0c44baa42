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

TEST(JsonTree, says_which_encoding_a_file_has_that_is_not_utf_8) {
  const auto wide = [](std::string_view mark, std::size_t zeros_before, std::size_t zeros_after) {
    std::string text(mark);
    for (const char c : std::string_view("{\"seed\": 1}"))
      text += std::string(zeros_before, '\0') + c + std::string(zeros_after, '\0');
    return text;
  };
  const auto expected = [](const std::string& name, const std::string& encoding) {
    return "gpt.json is " + name +
           " text, and a config is UTF-8: save it as UTF-8, or convert it: iconv -f " + encoding +
           " -t UTF-8 gpt.json > utf8.json";
  };
  using namespace std::string_view_literals;
  EXPECT_EQ(syntax_error(wide("\xff\xfe", 0, 1)), expected("UTF-16", "UTF-16"));
  EXPECT_EQ(syntax_error(wide("\xfe\xff", 1, 0)), expected("UTF-16", "UTF-16"));
  EXPECT_EQ(syntax_error(wide("", 0, 1)), expected("UTF-16", "UTF-16LE"));
  EXPECT_EQ(syntax_error(wide("", 1, 0)), expected("UTF-16", "UTF-16BE"));
  EXPECT_EQ(syntax_error(wide("\xff\xfe\0\0"sv, 0, 3)), expected("UTF-32", "UTF-32"));
  EXPECT_EQ(syntax_error(wide("\0\0\xfe\xff"sv, 3, 0)), expected("UTF-32", "UTF-32"));
  EXPECT_EQ(syntax_error(wide("", 0, 3)), expected("UTF-32", "UTF-32LE"));
  EXPECT_EQ(syntax_error(wide("", 3, 0)), expected("UTF-32", "UTF-32BE"));
  EXPECT_THAT(syntax_error("{\"caf\xe9\": 1}"),
              EndsWith("(a config is UTF-8: save it as that, or convert it, for example from "
                       "Latin-1: iconv -f ISO-8859-1 -t UTF-8 gpt.json > utf8.json)"));
  const JsonNode marked = parse_json("\xef\xbb\xbf{\"a\": 1}", "gpt.json");
  EXPECT_NE(marked.find("a"), nullptr) << "UTF-8 with a mark is UTF-8";
}

TEST(JsonTree, quotes_what_people_write_and_nothing_that_a_terminal_obeys) {
  EXPECT_EQ(shorten_quote("größe 大きさ 😀 ×"), "größe 大きさ 😀 ×");
  EXPECT_EQ(shorten_quote("a\x1b[31m\n\x7f\xc2\x9b"), "a?[31m????") << "a sequence has two bytes";
  EXPECT_EQ(shorten_quote("\xe2\x80\xae."), "???.") << "right to left from here";
  EXPECT_EQ(shorten_quote("\xc0\xaf\xe4\xb8\xff\xed\xa0\x80\xf5"), "?????????") << "no UTF-8";
  EXPECT_EQ(shorten_quote("ééééé", 5), "ééééé");
  EXPECT_EQ(shorten_quote("éééééé", 5), "éé...");
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
