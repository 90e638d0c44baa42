#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/base/version.h>
#include <lockstep/checkpoint/format/manifest.h>

#include "../base/errors.h"

namespace lockstep::checkpoint {
namespace {

using mesh::Placement;
using ::testing::AllOf;
using ::testing::HasSubstr;

Manifest example_manifest() {
  Manifest manifest;
  manifest.state.step = 500;
  manifest.state.last_loss = 0.1;
  manifest.state.config = "{\"lr\": 1}";
  const ContentHash hash{1, 2};
  manifest.files = {{"shard-00000.safetensors", {.bytes = 1000, .head_bytes = 200, .hash = hash}},
                    {"config.json", {.bytes = 3, .head_bytes = 3, .hash = hash}}};
  const Placement whole = Placement::full({4, 6});
  manifest.tensors["model/w \"x\""] = {
      DType::f32,
      {4, 6},
      {{"shard-00000.safetensors", whole.cut_dim(0, 0, 2), {hash}},
       {"shard-00000.safetensors", whole.cut_dim(0, 1, 2).cut_flat(0, 2), {hash}},
       {"shard-00000.safetensors", Placement::full({2, 2, 6}).cut_flat(3, 4), {hash}}}};
  manifest.tensors["optimizer/step"] = {
      DType::i64, {}, {{"shard-00000.safetensors", Placement::full({}), {hash}}}};
  manifest.tensors["empty"] = {
      DType::i64, {0, 2}, {{"shard-00000.safetensors", Placement::full({0, 2}), {}}}};
  return manifest;
}

// Changes a part of the text and seals it again, as if it had been written that way.
std::string error_with(const std::string& from, const std::string& to) {
  std::string text = to_text(example_manifest());
  text = text.substr(0, text.rfind(",\n \"hash\""));
  const auto at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  text.replace(at, from.size(), to);
  return usage_error([&] { parse_manifest(seal_manifest(text), "'file'"); });
}

TEST(Manifest, ComesBackAsItWas) {
  EXPECT_EQ(parse_manifest(to_text(example_manifest()), "it"), example_manifest());
  EXPECT_EQ(parse_manifest(to_text(Manifest()), "it"), Manifest());
}

TEST(Manifest, SaysWhichVersionWroteIt) {
  EXPECT_THAT(to_text(Manifest()),
              HasSubstr("\"written_by\": \"lockstep " + std::string(version()) + "\""));
}

TEST(Manifest, WhatMakesNoSenseIsRefusedByName) {
  EXPECT_THAT(error_with("lockstep-checkpoint", "x"),
              AllOf(HasSubstr("'file', 'format'"), HasSubstr("not the manifest")));
  EXPECT_THAT(error_with("\"version\": 2", "\"version\": 3"), HasSubstr("it is of version 3"));
  EXPECT_THAT(error_with("\"F32\"", "\"F33\""), HasSubstr("no type of elements"));
  EXPECT_THAT(error_with("\"F32\"", "\"F4\""), HasSubstr("less than a byte"));
  EXPECT_THAT(error_with("\"shape\": [0, 2]", "\"shape\": [2305843009213693952]"),
              AllOf(HasSubstr("'file', 'tensors.empty"), HasSubstr("more than a file can hold")));
  EXPECT_THAT(error_with("[4, 6]", "[4, 7]"), HasSubstr("tensors.model/w"));
  EXPECT_THAT(error_with("[4, 6]", "[4, -6]"), HasSubstr("not a whole number"));
  EXPECT_THAT(error_with("[4, 6]", "[4611686018427387904, 6]"), HasSubstr("tensors.model/w"));
  EXPECT_THAT(error_with("\"box\": [[0, 2]", "\"box\": [[0, 5]"), HasSubstr("pieces[0]"));
  EXPECT_THAT(error_with("\"box\": [[0, 2], [0, 6]]", "\"box\": [[0, 2]]"),
              HasSubstr("not a side for each dim"));
  EXPECT_THAT(error_with("\"as\": [2, 2, 6]", "\"as\": [2, 2, 5]"),
              HasSubstr("another number of elements"));
  EXPECT_THAT(error_with("\"range\": [18, 24]", "\"range\": [18, 25]"), HasSubstr("pieces[2]"));
  EXPECT_THAT(error_with("{\"file\": \"shard-00000.safetensors\"", "{\"file\": \"other\""),
              HasSubstr("not one of the checkpoint's files"));
  EXPECT_THAT(error_with("\"config.json\": ", "\"../config.json\": "),
              HasSubstr("is not the name of a file"));
  EXPECT_THAT(error_with("\"head_bytes\": 200", "\"head_bytes\": 2000"),
              HasSubstr("more first bytes than bytes"));
  EXPECT_THAT(error_with("\"hashes\": [\"0", "\"hashes\": [\"z"), HasSubstr("not a hash"));
  EXPECT_THAT(error_with("\"hashes\": []", "\"hashes\": [\"00000000000000010000000000000002\"]"),
              HasSubstr("1 hashes for a piece of 0 bytes"));
}

TEST(Manifest, PartsOfRanksBecomeOne) {
  Manifest all;
  Manifest first, second;
  first.files["a"] = second.files["b"] = {};
  first.tensors["w"] = {DType::f32, {4}, {{"a", Placement::full({4}).cut_flat(0, 2), {}}}};
  second.tensors["w"] = {DType::f32, {4}, {{"b", Placement::full({4}).cut_flat(1, 2), {}}}};
  add(all, first);
  EXPECT_THAT(usage_error([&] { check_complete(all, "it"); }),
              HasSubstr("of the 4 elements of 'w' there are 2"));
  add(all, second);
  EXPECT_EQ(all.tensors.at("w").pieces.size(), 2u);
  check_complete(all, "it");
  EXPECT_THAT(usage_error([&] { add(all, first); }), HasSubstr("two ranks wrote the file 'a'"));
  Manifest other;
  other.tensors["w"] = {DType::f32, {5}, {}};
  EXPECT_THAT(usage_error([&] { add(all, other); }),
              HasSubstr("ranks differ in what 'w' is: F32 [4] and F32 [5]"));
}

}  // namespace
}  // namespace lockstep::checkpoint
