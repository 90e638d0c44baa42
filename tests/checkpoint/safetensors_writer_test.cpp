#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/checkpoint/safetensors/folder.h>
#include <lockstep/checkpoint/safetensors/writer.h>

#include "../base/errors.h"
#include "../base/files.h"
#include "bytes.h"

namespace lockstep::checkpoint {
namespace {

using ::testing::AllOf;
using testing::as_bytes;
using testing::as_text;
using ::testing::HasSubstr;

TEST(SafetensorsWriter, WritesTheFormatToTheByte) {
  const testing::TemporaryFolder folder;
  const TensorDeclaration tensors[] = {{"a", DType::u8, {3}}, {"b", DType::i16, {}}};
  SafetensorsWriter writer(folder / "file", tensors, {{"format", "pt"}});
  writer.write(as_bytes("BB"));  // the larger elements come first
  writer.write(as_bytes("aaa"));
  writer.commit();
  const std::string header =
      R"({"__metadata__":{"format":"pt"},"b":{"dtype":"I16","shape":[],"data_offsets":[0,2]},)"
      R"("a":{"dtype":"U8","shape":[3],"data_offsets":[2,5]}})";
  const std::string padded = header + std::string((8 - header.size() % 8) % 8, ' ');
  EXPECT_EQ(testing::read_file(folder / "file"), testing::safetensors_bytes(padded, "BBaaa"));
}

TEST(SafetensorsWriter, WhatItWritesIsReadBack) {
  const testing::TemporaryFolder folder;
  const Metadata metadata{{"key \"quoted\"\n", "värde"}, {"", ""}};
  const TensorDeclaration tensors[] = {{"odd", DType::u8, {5}},    {"empty", DType::f64, {0, 7}},
                                       {"scalar", DType::f32, {}}, {"näme\t\"", DType::bf16, {2}},
                                       {"", DType::f4, {2, 3}},    {"wide", DType::c64, {1}}};
  SafetensorsWriter writer(folder / "file", tensors, metadata);
  std::map<std::string, std::string> contents;
  char next = 'a';
  for (const TensorEntry& entry : writer.entries()) {
    contents[entry.name] = std::string(entry.size_bytes(), next++);
    // Writes in pieces, as a stream does.
    for (const char& c : contents[entry.name]) writer.write(std::as_bytes(std::span(&c, 1)));
  }
  writer.commit();
  const SafetensorsFile file(folder / "file");
  EXPECT_EQ(file.metadata(), metadata);
  ASSERT_EQ(file.entries().size(), 6u);
  for (const TensorDeclaration& tensor : tensors) {
    const TensorEntry* const entry = file.find(tensor.name);
    ASSERT_NE(entry, nullptr) << tensor.name;
    EXPECT_EQ(entry->dtype, tensor.dtype);
    EXPECT_EQ(entry->shape, tensor.shape);
    const auto bytes = file.bytes(*entry);
    EXPECT_EQ(as_text(bytes), contents[tensor.name]);
    const std::size_t alignment = std::max(bits_of(tensor.dtype) / 8, 1u);
    EXPECT_TRUE(bytes.empty() || reinterpret_cast<std::uintptr_t>(bytes.data()) % alignment == 0);
  }
}

TEST(SafetensorsWriter, AFileWithoutTensors) {
  const testing::TemporaryFolder folder;
  SafetensorsWriter(folder / "file", {}).commit();
  EXPECT_TRUE(SafetensorsFile(folder / "file").entries().empty());
}

TEST(SafetensorsWriter, BytesThatWereNotDeclaredOrNotWrittenLeaveNoFile) {
  const testing::TemporaryFolder folder;
  const TensorDeclaration tensors[] = {{"a", DType::u8, {3}}};
  {
    SafetensorsWriter writer(folder / "file", tensors);
    writer.write(as_bytes("12"));
    EXPECT_THAT(usage_error([&] { writer.commit(); }), HasSubstr("2 bytes were written of the 3"));
    EXPECT_THAT(usage_error([&] { writer.write(as_bytes("34")); }),
                HasSubstr("1 bytes more than the 3"));
  }
  EXPECT_TRUE(is_empty(folder.path()));
}

TEST(SafetensorsWriter, DeclarationsThatMakeNoSenseAreRefused) {
  const auto error = [](std::vector<TensorDeclaration> tensors, const Metadata& metadata = {}) {
    return usage_error([&] { plan_safetensors(tensors, metadata); });
  };
  EXPECT_THAT(error({{"a", DType::u8, {}}, {"a", DType::u8, {}}}),
              HasSubstr("'a' is to be written twice"));
  EXPECT_THAT(error({{"__metadata__", DType::u8, {}}}), HasSubstr("'__metadata__'"));
  EXPECT_THAT(error({{"\xff", DType::u8, {}}}), HasSubstr("not UTF-8"));
  EXPECT_THAT(error({}, {{"k", "\xff"}}), HasSubstr("not UTF-8"));
  EXPECT_THAT(error({{"a", DType::u8, {-1}}}), HasSubstr("tensor 'a': the shape [-1]"));
  EXPECT_THAT(error({{"a", DType::u8, {1ll << 60}},
                     {"b", DType::u8, {1ll << 60}},
                     {"c", DType::u8, {1ll << 60}},
                     {"d", DType::u8, {1ll << 60}},
                     {"e", DType::u8, {1}}}),
              HasSubstr("tensor 'e': the tensors up to it have more than 2^62 bytes"));
  EXPECT_THAT(error({{std::string(100'000'000, 'n'), DType::u8, {}}}),
              HasSubstr("header has at most 100000000"));
}

TEST(SafetensorsWriter, ADiskWithoutRoomIsToldBeforeAnythingIsWritten) {
  const testing::TemporaryFolder folder;
  const TensorDeclaration tensors[] = {{"a", DType::u8, {1ll << 60}}};
  try {
    SafetensorsWriter(folder / "file", tensors);
    FAIL() << "an exbibyte found room";
  } catch (const FileError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr(folder.path().string()), HasSubstr("115292150460684"),
                                    HasSubstr("are free")));
  }
  EXPECT_TRUE(is_empty(folder.path()));
  EXPECT_NO_THROW(check_free_space(folder.path(), 1));
}

}  // namespace
}  // namespace lockstep::checkpoint
