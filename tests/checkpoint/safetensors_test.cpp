#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/checkpoint/safetensors/folder.h>

#include "../base/errors.h"
#include "../base/files.h"
#include "bytes.h"

namespace lockstep::checkpoint {
namespace {

using ::testing::AllOf;
using testing::as_bytes;
using testing::as_text;
using ::testing::HasSubstr;
using testing::safetensors_bytes;
using ::testing::StartsWith;

SafetensorsHeader parse(const std::string& file) { return parse_header(as_bytes(file), "weights"); }

// The error about a file with this header and so many bytes of data.
std::string refusal(const std::string& header, std::size_t data_bytes = 0) {
  const std::string file = safetensors_bytes(header, std::string(data_bytes, 'x'));
  const std::string text = usage_error([&] { parse(file); });
  EXPECT_THAT(text, StartsWith("safetensors file 'weights'")) << header;
  return text;
}

TEST(SafetensorsHeader, ReadsNamesTypesShapesAndPlaces) {
  const SafetensorsHeader header = parse(safetensors_bytes(
      R"({"__metadata__":{"format":"pt"},"b":{"dtype":"I16","shape":[2,1],"data_offsets":[4,8]},)"
      R"( "a":{"shape":[],"data_offsets":[0,4],"dtype":"F32"}}   )",
      "12345678"));
  EXPECT_EQ(header.metadata, (Metadata{{"format", "pt"}}));
  // Entries are in the order of their bytes, whatever the order in the JSON.
  ASSERT_EQ(header.entries.size(), 2u);
  EXPECT_EQ(header.entries[0], (TensorEntry{"a", DType::f32, {}, 0, 4}));
  EXPECT_EQ(header.entries[1], (TensorEntry{"b", DType::i16, {2, 1}, 4, 8}));
  EXPECT_EQ(header.find("b"), &header.entries[1]);
  EXPECT_EQ(header.find("c"), nullptr);
  EXPECT_EQ(header.find(""), nullptr);
}

TEST(SafetensorsHeader, AFileMayBeEmptyOfTensorsAndTensorsOfElements) {
  EXPECT_TRUE(parse(safetensors_bytes("{}")).entries.empty());
  const auto header =
      parse(safetensors_bytes(R"({"z":{"dtype":"F64","shape":[3,0,5],"data_offsets":[0,0]},)"
                              R"("one":{"dtype":"BOOL","shape":[1],"data_offsets":[0,1]},)"
                              R"("y":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}})",
                              "1"));
  EXPECT_EQ(header.find("z")->size_bytes(), 0u);
  EXPECT_EQ(header.find("one")->size_bytes(), 1u);
  EXPECT_EQ(header.find("y")->begin, 1u);
}

TEST(SafetensorsHeader, EveryTypeHasItsSize) {
  const std::pair<const char*, std::size_t> sizes_of_eight[] = {
      {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
      {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
      {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
      {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
      {"I64", 64},        {"U64", 64}};
  for (const auto& [dtype, bytes] : sizes_of_eight) {
    const std::string header =
        fmt::format(R"({{"t":{{"dtype":"{}","shape":[8],"data_offsets":[0,{}]}}}})", dtype, bytes);
    const auto parsed = parse(safetensors_bytes(header, std::string(bytes, 'x')));
    EXPECT_EQ(name(parsed.find("t")->dtype), dtype);
    EXPECT_THAT(
        refusal(fmt::format(R"({{"t":{{"dtype":"{}","shape":[8],"data_offsets":[0,{}]}}}})", dtype,
                            bytes + 1),
                bytes + 1),
        HasSubstr(fmt::format("takes {} bytes, and the header gives it {}", bytes, bytes + 1)));
  }
}

TEST(SafetensorsHeader, ALengthThatCannotBeIsRefused) {
  const auto error = [](const std::string& file) { return usage_error([&] { parse(file); }); };
  EXPECT_THAT(error(""), HasSubstr("has 0 bytes, too few for a header: it is empty"));
  EXPECT_THAT(error("1234567"), HasSubstr("has 7 bytes"));
  EXPECT_THAT(error(testing::length_prefix(100'000'001) + "{}"), HasSubstr("100000001"));
  EXPECT_THAT(error(testing::length_prefix(~0ull) + "{}"), HasSubstr("18446744073709551615"));
  EXPECT_THAT(error(testing::length_prefix(3) + "{}"),
              HasSubstr("header has 3 bytes, and the file has 10"));
  EXPECT_THAT(error(safetensors_bytes("")), HasSubstr("does not begin with '{'"));
  EXPECT_THAT(error(safetensors_bytes(" {}")), HasSubstr("does not begin with '{'"));
}

TEST(SafetensorsHeader, WhatIsNoJsonIsRefusedWithThePlace) {
  EXPECT_THAT(refusal("{\"a\":"), HasSubstr("not valid JSON at byte"));
  EXPECT_THAT(refusal("{} x"), HasSubstr("at byte 12 of the file"));
  EXPECT_THAT(refusal(std::string("{}\0\0", 4)), HasSubstr("not valid JSON"));
  EXPECT_THAT(refusal("{\"\xff\":1}"), HasSubstr("not valid JSON"));
  EXPECT_THAT(refusal("{\"a\":" + std::string(100000, '[')), HasSubstr("a list under 'a'"));
}

TEST(SafetensorsHeader, WhatIsThereTwiceIsRefused) {
  const std::string t = R"("t":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  EXPECT_THAT(refusal("{" + t + "," + t + "}"), HasSubstr("tensor 't': the header names it twice"));
  EXPECT_THAT(refusal(R"({"__metadata__":{},"__metadata__":{}})"),
              HasSubstr("'__metadata__' is there twice"));
  EXPECT_THAT(refusal(R"({"__metadata__":{"k":"1","k":"2"}})"), HasSubstr("has the key 'k' twice"));
  EXPECT_THAT(refusal(R"({"t":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}})"),
              HasSubstr("tensor 't': the key 'dtype' is there twice"));
}

TEST(SafetensorsHeader, WhatHasAnotherFormIsRefused) {
  const auto tensor = [](const std::string& fields) { return refusal("{\"t\":{" + fields + "}}"); };
  EXPECT_THAT(tensor(R"("shape":[0],"data_offsets":[0,0])"), HasSubstr("'dtype' is missing"));
  EXPECT_THAT(tensor(R"("dtype":"U8","data_offsets":[0,0])"), HasSubstr("'shape' is missing"));
  EXPECT_THAT(tensor(R"("dtype":"U8","shape":[0])"), HasSubstr("'data_offsets' is missing"));
  EXPECT_THAT(tensor(R"("dtype":"F33")"), HasSubstr("tensor 't': there is no dtype 'F33'"));
  EXPECT_THAT(tensor(R"("dtype":1)"), HasSubstr("a number under 'dtype'"));
  EXPECT_THAT(tensor(R"("dtype":["U8"])"), HasSubstr("a list under 'dtype'"));
  EXPECT_THAT(tensor(R"("shape":"U8")"), HasSubstr("a text under 'shape'"));
  EXPECT_THAT(tensor(R"("shape":[-1])"), HasSubstr("a number below 0 in its shape"));
  EXPECT_THAT(tensor(R"("shape":[1.0])"), HasSubstr("not whole, or too large in its shape"));
  EXPECT_THAT(tensor(R"("shape":[1e3])"), HasSubstr("not whole"));
  EXPECT_THAT(tensor(R"("shape":[9223372036854775808])"), HasSubstr("9223372036854775808"));
  EXPECT_THAT(tensor(R"("shape":[[1]])"), HasSubstr("a list in its shape"));
  EXPECT_THAT(tensor(R"("data_offsets":[0])"), HasSubstr("fewer than two"));
  EXPECT_THAT(tensor(R"("data_offsets":[0,0,0])"), HasSubstr("more than two"));
  EXPECT_THAT(tensor(R"("data_offsets":[0,99999999999999999999])"), HasSubstr("too large"));
  EXPECT_THAT(tensor(R"("data_offsets":null)"), HasSubstr("null under 'data_offsets'"));
  EXPECT_THAT(tensor(R"("strides":[1])"), HasSubstr("unknown key 'strides'"));
  EXPECT_THAT(refusal(R"({"t":5})"), HasSubstr("a number under 't', not an object"));
  EXPECT_THAT(refusal(R"({"__metadata__":{"k":1}})"), HasSubstr("a number under 'k', not a text"));
  EXPECT_THAT(refusal(R"({"__metadata__":{"k":{}}})"), HasSubstr("an object under 'k'"));
  std::string dims = "1";
  for (int i = 0; i < 64; ++i) dims += ",1";
  EXPECT_THAT(tensor("\"shape\":[" + dims + "]"), HasSubstr("more than 64 dims"));
}

TEST(SafetensorsHeader, ShapesAreMultipliedWithoutOverflow) {
  const auto shaped = [](const char* dtype, const char* shape) {
    return refusal(
        fmt::format(R"({{"t":{{"dtype":"{}","shape":{},"data_offsets":[0,8]}}}})", dtype, shape),
        8);
  };
  EXPECT_THAT(shaped("U8", "[4294967296,4294967296]"), HasSubstr("2^63 elements or more"));
  EXPECT_THAT(shaped("U8", "[4294967296,4294967296,0]"), HasSubstr("2^63 elements or more"));
  EXPECT_THAT(shaped("F64", "[4611686018427387904]"), HasSubstr("more than a file can hold"));
  EXPECT_THAT(shaped("F32", "[3]"), HasSubstr("F32 of shape [3] takes 12 bytes"));
  EXPECT_THAT(shaped("F4", "[3]"), HasSubstr("do not fill whole bytes"));
}

TEST(SafetensorsHeader, BytesThatOverlapLeaveAGapOrDoNotEndWithTheFileAreRefused) {
  const auto two = [](const char* first, const char* second, std::size_t bytes) {
    return refusal(fmt::format(R"({{"a":{{"dtype":"U8","shape":[4],"data_offsets":{}}},)"
                               R"("b":{{"dtype":"U8","shape":[4],"data_offsets":{}}}}})",
                               first, second),
                   bytes);
  };
  EXPECT_THAT(two("[0,4]", "[3,7]", 7), HasSubstr("tensor 'b': begins at byte 3 of the data, where "
                                                  "4 was to be: tensors overlap"));
  EXPECT_THAT(two("[0,4]", "[0,4]", 4), HasSubstr("overlap"));
  EXPECT_THAT(two("[0,4]", "[5,9]", 9), HasSubstr("leave a gap"));
  EXPECT_THAT(two("[1,5]", "[5,9]", 9), AllOf(HasSubstr("tensor 'a'"), HasSubstr("leave a gap")));
  EXPECT_THAT(two("[0,4]", "[8,4]", 8), HasSubstr("ends before, at 4"));
  EXPECT_THAT(two("[0,4]", "[4,8]", 7),
              HasSubstr("describes 8 bytes of data, and the file has 7: it is cut off"));
  EXPECT_THAT(two("[0,4]", "[4,8]", 9), HasSubstr("something was added"));
}

TEST(SafetensorsHeader, NamesFromAFileCannotFloodOrSteerATerminal) {
  const std::string text =
      refusal("{\"\\u001b[2J" + std::string(100000, 'n') + R"(":{"dtype":"X"}})");
  EXPECT_THAT(text, HasSubstr("\\x1b[2J"));
  EXPECT_LT(text.size(), 400u);
}

TEST(SafetensorsFile, GivesTheBytesOfEachTensor) {
  const testing::TemporaryFolder folder;
  testing::write_file(folder / "file",
                      safetensors_bytes(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
                                        R"("b":{"dtype":"U8","shape":[3],"data_offsets":[2,5]}})",
                                        "12345"));
  const SafetensorsFile file(folder / "file");
  EXPECT_EQ(as_text(file.bytes(*file.find("a"))), "12");
  EXPECT_EQ(as_text(file.bytes(*file.find("b"))), "345");
}

TEST(SafetensorsFile, NamesAFileThatIsNotThereOrCutOff) {
  const testing::TemporaryFolder folder;
  EXPECT_THAT(usage_error([&] { SafetensorsFile(folder / "none"); }), HasSubstr("none"));
  testing::write_file(folder / "empty", "");
  EXPECT_THAT(usage_error([&] { SafetensorsFile(folder / "empty"); }),
              AllOf(HasSubstr((folder / "empty").string()), HasSubstr("it is empty")));
}

}  // namespace
}  // namespace lockstep::checkpoint
