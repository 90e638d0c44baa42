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
using ::testing::HasSubstr;

// Writes a file with one tensor of one byte for each letter of `names`.
void write_tensors(const std::filesystem::path& path, const std::string& names) {
  std::vector<TensorDeclaration> tensors;
  for (const char c : names) tensors.push_back({std::string(1, c), DType::u8, {1}});
  SafetensorsWriter writer(path, tensors);
  writer.write(testing::as_bytes(names));
  writer.commit();
}

void write_index(const std::filesystem::path& folder, const std::string& weight_map) {
  testing::write_file(folder / kModelIndex,
                      R"({"metadata":{"total_size":123},"weight_map":)" + weight_map + "}");
}

std::string names_of(const SafetensorsFolder& folder) {
  std::string names;
  for (const StoredTensor& tensor : folder.tensors()) names += tensor.name();
  return names;
}

std::string error(const std::filesystem::path& path) {
  return usage_error([&] { SafetensorsFolder{path}; });
}

TEST(SafetensorsFolder, OneFile) {
  const testing::TemporaryFolder folder;
  write_tensors(folder / "model.safetensors", "cab");
  write_tensors(folder / "other.safetensors", "x");
  const SafetensorsFolder model(folder.path());
  EXPECT_EQ(names_of(model), "abc");
  EXPECT_EQ(testing::as_text(model.find("b")->bytes()), "b");
  EXPECT_EQ(model.find("x"), nullptr);
  EXPECT_EQ(names_of(SafetensorsFolder(folder / "other.safetensors")), "x");
}

TEST(SafetensorsFolder, SeveralFilesAreOneView) {
  const testing::TemporaryFolder folder;
  write_tensors(folder / "1.safetensors", "ad");
  write_tensors(folder / "2.safetensors", "bce");
  testing::write_file(folder / "3.safetensors", "damaged, and no part of the model");
  write_index(folder.path(), R"({"a":"1.safetensors","b":"2.safetensors","d":"1.safetensors",)"
                             R"("c":"2.safetensors"})");
  const SafetensorsFolder model(folder.path());
  EXPECT_EQ(names_of(model), "abcd");  // the index does not name e
  EXPECT_EQ(testing::as_text(model.find("c")->bytes()), "c");
  EXPECT_EQ(testing::as_text(model.find("d")->bytes()), "d");
  EXPECT_EQ(model.find("c")->file, model.find("b")->file);
  EXPECT_EQ(names_of(SafetensorsFolder(folder / kModelIndex)), "abcd");
}

TEST(SafetensorsFolder, TheIndexAndItsFilesMustAgree) {
  const testing::TemporaryFolder folder;
  write_tensors(folder / "1.safetensors", "a");
  write_index(folder.path(), R"({"a":"1.safetensors","b":"1.safetensors"})");
  EXPECT_THAT(error(folder.path()), AllOf(HasSubstr("tensor 'b'"),
                                          HasSubstr("1.safetensors', which has no such tensor")));
  write_index(folder.path(), R"({"a":"1.safetensors","b":"2.safetensors"})");
  EXPECT_THAT(error(folder.path()),
              AllOf(HasSubstr("tensor 'b'"), HasSubstr("2.safetensors', which is not there")));
}

TEST(SafetensorsFolder, NoFileOutsideOfTheFolderIsOpened) {
  const testing::TemporaryFolder folder;
  write_tensors(folder / "1.safetensors", "a");
  create_directory(folder / "in");
  for (const char* name : {"../1.safetensors", "..", ".", "", "/etc/passwd", "in/1.safetensors",
                           "..\\\\1.safetensors", "1.safetensors\\u0000"}) {
    write_index(folder / "in", fmt::format(R"({{"a":"{}"}})", name));
    EXPECT_THAT(error(folder / "in"), HasSubstr("is not the name of a file in the index's own"))
        << name;
  }
}

TEST(SafetensorsFolder, AnIndexThatIsNoneIsRefused) {
  const auto index_error = [](const std::string& text) {
    return usage_error([&] { parse_index(text, "index"); });
  };
  EXPECT_THAT(index_error(""), HasSubstr("index, byte 1: not valid JSON"));
  EXPECT_THAT(index_error(std::string("{\"weight_map\":{}}\0", 18)),
              HasSubstr("byte 18: not valid"));
  EXPECT_THAT(index_error("[]"), HasSubstr("not an object"));
  EXPECT_THAT(index_error("{}"), HasSubstr("the key 'weight_map' is missing"));
  EXPECT_THAT(index_error(R"({"weight_map":[]})"), HasSubstr("'weight_map': not an object"));
  EXPECT_THAT(index_error(R"({"weight_map":{"a":1}})"), HasSubstr("'weight_map.a': not a text"));
  EXPECT_THAT(index_error(R"({"weight_map":{"a":"1","a":"2"}})"), HasSubstr("'a' is there twice"));
  EXPECT_THAT(index_error(R"({"weight_map":{},"x":)" + std::string(50, '[')),
              HasSubstr("nested deeper"));
  EXPECT_THAT(index_error(R"({"weight_map":{},"x":1e999})"), HasSubstr("number that is too large"));
}

TEST(SafetensorsFolder, AFolderWithoutAModelSaysWhatToDo) {
  const testing::TemporaryFolder folder;
  EXPECT_THAT(error(folder.path()), HasSubstr("has neither model.safetensors nor"));
  testing::write_file(folder / "pytorch_model.bin", "");
  EXPECT_THAT(error(folder.path()), HasSubstr("convert it to safetensors"));
  write_tensors(folder / "adapter.safetensors", "a");
  EXPECT_THAT(error(folder.path()), HasSubstr("It has 'adapter.safetensors'"));
  EXPECT_THAT(error(folder / "none"), HasSubstr("none': No such file"));
}

// An exported model, with its lockstep-hashes.json.
TEST(SafetensorsFolder, WhatHasAnotherHashIsNotGivenAway) {
  const testing::TemporaryFolder folder;
  write_tensors(folder / "model.safetensors", "ab");
  testing::write_file(folder / "config.json", "{}");
  FolderHashes hashes;
  hashes.add_text("config.json", "{}");
  hashes.add_tensor("model.safetensors", "a", testing::as_bytes("a"));
  hashes.add_tensor("model.safetensors", "b", testing::as_bytes("a"));
  testing::write_file(folder / kHashesFile, hashes.text());
  for (const auto& path : {folder.path(), folder / "model.safetensors"}) {
    const SafetensorsFolder model(path);
    EXPECT_EQ(testing::as_text(model.find("a")->bytes()), "a");
    EXPECT_THAT(
        usage_error([&] { (void)model.find("b")->bytes(); }),
        AllOf(HasSubstr("the tensor 'b' in 'model.safetensors'"),
              HasSubstr("does not have the hash"), HasSubstr("remove lockstep-hashes.json")));
    EXPECT_EQ(model.text_file("config.json"), "{}");
    testing::write_file(folder / "config.json", "{ }");
    EXPECT_THAT(usage_error([&] { (void)model.text_file("config.json"); }),
                HasSubstr("'config.json'"));
    testing::write_file(folder / "config.json", "{}");
  }
  write_tensors(folder / "beside.safetensors", "x");
  EXPECT_EQ(testing::as_text(SafetensorsFolder(folder / "beside.safetensors").find("x")->bytes()),
            "x");
  testing::write_file(folder / kHashesFile, R"({"tensors": {}, "texts": {}})");
  const SafetensorsFolder model(folder.path());
  EXPECT_THAT(usage_error([&] { (void)model.find("a")->bytes(); }), HasSubstr("has no hash in"));
  EXPECT_THAT(usage_error([&] { (void)model.text_file("config.json"); }),
              HasSubstr("has no hash in"));
  testing::write_file(folder / kHashesFile, "{}");
  EXPECT_THAT(error(folder.path()), HasSubstr(kHashesFile));
}

}  // namespace
}  // namespace lockstep::checkpoint
