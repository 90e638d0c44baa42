// Damaged or wrong token files: each message names the file, what was found, and what to do.
#include <functional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/data/tokens/sequences.h>

#include "../base/errors.h"
#include "../base/files.h"
#include "token_files.h"

namespace lockstep::data {
namespace {

using lockstep::testing::TemporaryFolder;
using lockstep::testing::write_file;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::string opening(const std::filesystem::path& path, std::string_view format = kAutomaticFormat) {
  return usage_error([&] { TokenFile::open(path, format); });
}

TEST(BadTokenFile, MissingEmptyOrNoFile) {
  const TemporaryFolder folder;
  EXPECT_THAT(opening(folder / "nowhere.txt"),
              AllOf(HasSubstr("no token file '" + (folder / "nowhere.txt").string()),
                    HasSubstr("one of these formats: text, nanogpt (.bin, no header), llm.c")));
  EXPECT_THAT(opening(folder.path()), HasSubstr("is a folder"));
  for (const char* name : {"empty.txt", "empty.bin"}) {
    write_file(folder / name, "");
    for (const char* format : {"auto", "text", "nanogpt", "llm.c"})
      EXPECT_THAT(opening(folder / name, format), AllOf(HasSubstr(name), HasSubstr("is empty")));
  }
}

TEST(BadTokenFile, NanoGptOfOddLength) {
  const TemporaryFolder folder;
  write_file(folder / "train.bin", "seven b");
  EXPECT_THAT(opening(folder / "train.bin"),
              AllOf(HasSubstr("train.bin' has 7 bytes, an odd number"), HasSubstr("'text'")));
}

TEST(BadTokenFile, LlmC) {
  const TemporaryFolder folder;
  const std::string four(4, 't');
  const struct {
    const char* what;
    std::string bytes;
    std::string says;
  } cases[] = {
      {"another magic number", llm_c_header(20240521, 1, 2) + four,
       "begins with 20240521, but llm.c's begin with 20240520 (GPT-2) or 20240801"},
      {"another version", llm_c_header(20240520, 2, 2) + four, "says version 2 at byte 4"},
      {"the other kind's version", llm_c_header(20240801, 1, 1) + four, "have version 7"},
      {"fewer tokens than it says", llm_c_header(20240520, 1, 3) + four,
       "at byte 8 that it has 3 tokens of 2 bytes, but after its header there are 4 bytes"},
      {"more tokens than it says", llm_c_header(20240801, 7, 1) + four + four,
       "it has 1 tokens of 4 bytes, but after its header there are 8"},
      {"a huge count", llm_c_header(20240801, 7, 2147483647) + four, "has 2147483647 tokens"},
      {"a negative count", llm_c_header(20240520, 1, -2) + four, "has -2 tokens"},
      {"no tokens", llm_c_header(20240520, 1, 0), "has a header and no tokens"},
      {"half a header", llm_c_header(20240520, 1, 2).substr(0, 500),
       "has 500 bytes, but llm.c's header alone has 1024"},
      {"less than a magic number", "abc", "has 3 bytes, but llm.c's header"},
  };
  for (const auto& [what, bytes, says] : cases) {
    SCOPED_TRACE(what);
    write_file(folder / "t.bin", bytes);
    EXPECT_THAT(opening(folder / "t.bin", "llm.c"), AllOf(HasSubstr("t.bin"), HasSubstr(says)));
  }
  // If the magic number is right, the file is not taken for another format.
  write_file(folder / "t.bin", llm_c_header(20240520, 2, 2) + four);
  EXPECT_THAT(opening(folder / "t.bin"), HasSubstr("says version 2"));
}

class BadMegatron : public ::testing::Test {
 protected:
  // The error when `spoil` has changed a good index of 3 sequences over 12 bytes.
  std::string spoilt(const std::function<void(IndexFile&)>& spoil) {
    IndexFile index = good();
    spoil(index);
    return opened(index.bytes());
  }

  static IndexFile good() { return IndexFile::contiguous(8, 2, {1, 2, 3}); }

  std::string opened(const std::string& index, const std::string& tokens = std::string(12, 't')) {
    write_file(folder_ / "c.idx", index);
    write_file(folder_ / "c.bin", tokens);
    return opening(folder_ / "c.bin");
  }

  const TemporaryFolder folder_;
};

TEST_F(BadMegatron, HeaderOfTheIndex) {
  EXPECT_THAT(spoilt([](IndexFile& index) { index.magic[3] = 'X'; }),
              AllOf(HasSubstr("c.idx' does not begin with MMIDIDX"), HasSubstr("which format")));
  EXPECT_THAT(spoilt([](IndexFile& index) { index.version = 2; }),
              HasSubstr("says version 2 at byte 9; only version 1 is known"));
  EXPECT_THAT(spoilt([](IndexFile& index) { index.type = 9; }), HasSubstr("has type 9 at byte 17"));
  EXPECT_THAT(spoilt([](IndexFile& index) { index.type = 0; }), HasSubstr("has type 0 at byte 17"));
  for (const std::uint8_t floating : {6, 7})
    EXPECT_THAT(spoilt([&](IndexFile& index) { index.type = floating; }),
                HasSubstr("floating-point"));
  EXPECT_THAT(opened(""), HasSubstr("has 0 bytes, but its header alone has 34"));
  EXPECT_THAT(opened(good().bytes().substr(0, 33)), HasSubstr("has 33 bytes"));
}

TEST_F(BadMegatron, SizesThatDoNotAddUp) {
  const std::string bytes = good().bytes();  // 34 + 3·12 + 4·8 = 102
  EXPECT_THAT(opened(bytes.substr(0, 101)),
              HasSubstr("has 101 bytes, but with 3 sequences and 4 document bounds it should have "
                        "102 (or 105 with modes)"));
  EXPECT_THAT(opened(bytes + "x"), HasSubstr("has 103 bytes"));
  EXPECT_THAT(opened(bytes + "four"), HasSubstr("has 106 bytes"));
  // Counts may be anything in a malicious file: no memory is allocated for them.
  for (const std::uint64_t count :
       {std::uint64_t{13}, std::uint64_t{1} << 40, std::uint64_t{1} << 63, ~std::uint64_t{0},
        ~std::uint64_t{0} / 12 + 1}) {
    std::string sequences = bytes;
    sequences.replace(18, 8, bytes_of(count));
    EXPECT_THAT(opened(sequences), HasSubstr("at byte 18 that it has " + std::to_string(count) +
                                             " sequences, but it has 102 bytes"));
    std::string documents = bytes;
    documents.replace(26, 8, bytes_of(count));
    EXPECT_THAT(opened(documents), HasSubstr("at byte 26 that it has " + std::to_string(count) +
                                             " document bounds, but it has 102 bytes"));
  }
}

TEST_F(BadMegatron, SequencesOutsideOfTheTokens) {
  EXPECT_THAT(opened(good().bytes(), std::string(10, 't')),
              AllOf(HasSubstr("sequence 2 has 3 tokens of 2 bytes from byte 6 on"),
                    HasSubstr(".bin has 10 bytes")));
  EXPECT_THAT(opened(good().bytes(), ""), HasSubstr("sequence 0 has 1 tokens"));
  EXPECT_THAT(opened(good().bytes(), std::string(14, 't')),
              HasSubstr("has 6 tokens of 2 bytes, one after the other, but its .bin has 14"));
  EXPECT_THAT(spoilt([](IndexFile& index) { index.lengths[1] = -1; }),
              HasSubstr("sequence 1 has -1 tokens"));
  EXPECT_THAT(spoilt([](IndexFile& index) { index.lengths[0] = 2147483647; }),
              HasSubstr("sequence 0 has 2147483647 tokens"));
  for (const std::int64_t pointer : {std::int64_t{-2}, std::int64_t{14}, std::int64_t{3},
                                     std::int64_t{1} << 62, std::int64_t{10}})
    EXPECT_THAT(
        spoilt([&](IndexFile& index) { index.pointers[1] = pointer; }),
        HasSubstr("sequence 1 has 2 tokens of 2 bytes from byte " + std::to_string(pointer)));
}

TEST_F(BadMegatron, NoTokens) {
  EXPECT_THAT(opened(IndexFile::contiguous(8, 2, {}).bytes(), ""),
              HasSubstr("has 0 sequences and no tokens"));
  EXPECT_THAT(opened(IndexFile::contiguous(8, 2, {0, 0}).bytes(), ""),
              HasSubstr("has 2 sequences and no tokens"));
}

TEST_F(BadMegatron, DocumentsThatAreNone) {
  EXPECT_THAT(spoilt([](IndexFile& index) {
                index.documents = {1, 2, 3};
              }),
              HasSubstr("document 0 begins at sequence 1"));
  EXPECT_THAT(spoilt([](IndexFile& index) {
                index.documents = {0, 2, 1, 3};
              }),
              HasSubstr("document 2 begins at sequence 1"));
  EXPECT_THAT(spoilt([](IndexFile& index) {
                index.documents = {0, 4};
              }),
              HasSubstr("document 1 begins at sequence 4"));
  EXPECT_THAT(spoilt([](IndexFile& index) {
                index.documents = {0, -1};
              }),
              HasSubstr("document 1 begins at sequence -1"));
}

TEST_F(BadMegatron, HalfOfThePair) {
  write_file(folder_ / "c.idx", good().bytes());
  EXPECT_THAT(opening(folder_ / "c.idx"), AllOf(HasSubstr("there is no '"), HasSubstr("c.bin'")));
  EXPECT_THAT(opening(folder_ / "d", "megatron"), HasSubstr("d.bin'"));
  write_file(folder_ / "d.bin", "to");
  EXPECT_THAT(opening(folder_ / "d.bin", "megatron"),
              AllOf(HasSubstr("there is no '"), HasSubstr("d.idx'")));
}

}  // namespace
}  // namespace lockstep::data
