// Reads every format as its programs write it.
#include <limits>

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
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(TokenFile, TextIsBytes) {
  const TemporaryFolder folder;
  write_file(folder / "verse.txt", std::string("In the \xff\0beginning", 17));
  const TokenFile file = TokenFile::open(folder / "verse.txt");
  EXPECT_EQ(file.format().name, "text");
  EXPECT_EQ(file.size(), 17);
  EXPECT_EQ(file.max_token(), 255);
  EXPECT_THAT(copied(file, 0, 2), ElementsAre('I', 'n'));
  EXPECT_THAT(copied(file, 6, 3), ElementsAre(' ', 255, 0));
  EXPECT_THAT(copied(file, 17, 0), ElementsAre());
  EXPECT_THAT(file.document_bounds(), ElementsAre(0, 17));
}

TEST(TokenFile, NanoGpt) {
  const TemporaryFolder folder;
  write_file(folder / "train.bin", bytes_of(std::vector<std::uint16_t>{1, 50256, 65535}));
  const TokenFile file = TokenFile::open(folder / "train.bin");
  EXPECT_EQ(file.format().name, "nanogpt");
  EXPECT_EQ(file.max_token(), 65535);
  EXPECT_THAT(all_of(file), ElementsAre(1, 50256, 65535));
  // A user who knows the format can name it.
  EXPECT_THAT(all_of(TokenFile::open(folder / "train.bin", "text")),
              ElementsAre(1, 0, 0x50, 0xc4, 255, 255));
}

TEST(TokenFile, LlmCOfBothKinds) {
  const TemporaryFolder folder;
  write_file(folder / "gpt2.bin",
             llm_c_header(20240520, 1, 3) + bytes_of(std::vector<std::uint16_t>{7, 50256, 9}));
  const TokenFile gpt2 = TokenFile::open(folder / "gpt2.bin");
  EXPECT_EQ(gpt2.format().name, "llm.c");
  EXPECT_EQ(gpt2.max_token(), 65535);
  EXPECT_THAT(all_of(gpt2), ElementsAre(7, 50256, 9));
  EXPECT_THAT(copied(gpt2, 2, 1), ElementsAre(9));

  write_file(folder / "llama", llm_c_header(20240801, 7, 2) +
                                   bytes_of(std::vector<std::uint32_t>{128000, 4294967295u}));
  const TokenFile llama = TokenFile::open(folder / "llama");
  EXPECT_EQ(llama.format().name, "llm.c");
  EXPECT_EQ(llama.max_token(), 4294967295);
  EXPECT_THAT(all_of(llama), ElementsAre(128000, 4294967295));
}

// Every integer type of Megatron, with its largest and smallest values.
template <typename T>
void megatron_round_trip(std::uint8_t type) {
  SCOPED_TRACE(static_cast<int>(type));
  using Limits = std::numeric_limits<T>;
  const TemporaryFolder folder;
  const std::vector<T> tokens = {1, Limits::max(), 3, Limits::min(), 5, 6};
  write_file(folder / "corpus.bin", bytes_of(tokens));
  write_file(folder / "corpus.idx", IndexFile::contiguous(type, sizeof(T), {3, 0, 2, 1}).bytes());
  const TokenFile file = TokenFile::open(folder / "corpus.bin");
  EXPECT_EQ(file.format().name, "megatron");
  EXPECT_EQ(file.max_token(), static_cast<std::int64_t>(Limits::max()));
  EXPECT_EQ(all_of(file), std::vector<std::int64_t>(tokens.begin(), tokens.end()));
  EXPECT_THAT(file.document_bounds(), ElementsAre(0, 3, 3, 5, 6));
}

TEST(TokenFile, MegatronOfEveryType) {
  megatron_round_trip<std::uint8_t>(1);
  megatron_round_trip<std::int8_t>(2);
  megatron_round_trip<std::int16_t>(3);
  megatron_round_trip<std::int32_t>(4);
  megatron_round_trip<std::int64_t>(5);
  megatron_round_trip<std::uint16_t>(8);
}

TEST(TokenFile, MegatronByAnyOfItsNames) {
  const TemporaryFolder folder;
  write_file(folder / "corpus.v1_text.bin", bytes_of(std::vector<std::uint16_t>{1, 2, 3}));
  write_file(folder / "corpus.v1_text.idx", IndexFile::contiguous(8, 2, {2, 1}).bytes());
  for (const char* name : {"corpus.v1_text.bin", "corpus.v1_text.idx", "corpus.v1_text"}) {
    for (const char* format : {"auto", "megatron"}) {
      const TokenFile file = TokenFile::open(folder / name, format);
      EXPECT_EQ(file.format().name, "megatron") << name;
      EXPECT_THAT(all_of(file), ElementsAre(1, 2, 3)) << name;
      EXPECT_EQ(file.path(), folder / "corpus.v1_text.bin");
    }
  }
  // A text file beside them is read as text.
  write_file(folder / "corpus.txt", "text");
  write_file(folder / "corpus.idx", "no index");
  EXPECT_EQ(TokenFile::open(folder / "corpus.txt").format().name, "text");
}

TEST(TokenFile, MegatronSequencesInAnyOrder) {
  const TemporaryFolder folder;
  IndexFile index;
  index.type = 4;
  index.lengths = {2, 1, 0, 3, 2};
  index.pointers = {16, 24, 4, 0, 8};  // the first two follow each other, the last two overlap
  index.documents = {0, 2, 4};         // sequence 4 is in no document, so it counts as one more
  index.modes = std::string(5, '\1');
  write_file(folder / "c.idx", index.bytes());
  write_file(folder / "c.bin", bytes_of(std::vector<std::int32_t>{10, 11, 12, 13, 14, 15, 16, 17}));
  const TokenFile file = TokenFile::open(folder / "c");
  const std::vector<std::int64_t> expected = {14, 15, 16, 10, 11, 12, 12, 13};
  EXPECT_EQ(all_of(file), expected);
  EXPECT_THAT(file.document_bounds(), ElementsAre(0, 3, 6, 8));
  for (std::int64_t first = 0; first <= file.size(); ++first)
    for (std::int64_t count = 0; count <= file.size() - first; ++count)
      EXPECT_EQ(copied(file, first, count),
                std::vector(expected.begin() + first, expected.begin() + first + count));
  EXPECT_THAT(usage_error([&] { file.check_vocabulary(16); }),
              HasSubstr("token 16 at position 2 of"));
  file.check_vocabulary(17);  // 17 is in the .bin, but in no sequence
}

TEST(TokenFile, RangesThatAreNotThere) {
  const TemporaryFolder folder;
  write_file(folder / "text", "four");
  const TokenFile file = TokenFile::open(folder / "text");
  EXPECT_THAT(usage_error([&] { copied(file, 2, 3); }),
              HasSubstr("asked for 3 tokens from position 2 on, but '"));
  EXPECT_THAT(usage_error([&] { copied(file, -1, 1); }), HasSubstr("position -1"));
  EXPECT_THAT(usage_error([&] { copied(file, std::numeric_limits<std::int64_t>::max(), 1); }),
              HasSubstr("has 4"));
}

// The place of the first bad token must not matter, although the scan works in blocks.
TEST(TokenFile, VocabularyIsCheckedToTheLastToken) {
  const TemporaryFolder folder;
  for (const std::size_t place : {0u, 1u, 1023u, 1024u, 2047u, 2500u, 2999u}) {
    std::vector<std::uint16_t> tokens(3000, 499);
    tokens[place] = 500;
    write_file(folder / "t.bin", bytes_of(tokens));
    const TokenFile file = TokenFile::open(folder / "t.bin");
    file.check_vocabulary(501);
    EXPECT_THAT(usage_error([&] { file.check_vocabulary(500); }),
                HasSubstr("token 500 at position " + std::to_string(place) + " of"));
  }
}

TEST(TokenFile, VocabularyAtTheEndsOfTheTypes) {
  const TemporaryFolder folder;
  const auto first_outside = [&](std::uint8_t type, const std::string& bytes, int item_bytes,
                                 std::int64_t vocabulary) -> std::string {
    write_file(folder / "t.bin", bytes);
    const auto count = static_cast<std::int32_t>(bytes.size()) / item_bytes;
    write_file(folder / "t.idx", IndexFile::contiguous(type, item_bytes, {count}).bytes());
    try {
      TokenFile::open(folder / "t.bin").check_vocabulary(vocabulary);
    } catch (const UsageError& error) {
      const std::string text = error.what();
      return text.substr(0, text.find(" of '"));
    }
    return "all inside";
  };
  constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
  const std::string u16 = bytes_of(std::vector<std::uint16_t>{0, 65535});
  EXPECT_EQ(first_outside(8, u16, 2, 65535), "token 65535 at position 1");
  EXPECT_EQ(first_outside(8, u16, 2, 65536), "all inside");
  EXPECT_EQ(first_outside(8, u16, 2, most), "all inside");
  EXPECT_EQ(first_outside(8, u16, 2, 0), "token 0 at position 0");
  EXPECT_EQ(first_outside(8, u16, 2, -5), "token 0 at position 0");
  const std::string i32 = bytes_of(std::vector<std::int32_t>{2147483647, -1});
  EXPECT_EQ(first_outside(4, i32, 4, 2147483647), "token 2147483647 at position 0");
  EXPECT_EQ(first_outside(4, i32, 4, most), "token -1 at position 1");
  const std::string i64 = bytes_of(std::vector<std::int64_t>{most - 1, -most - 1});
  EXPECT_EQ(first_outside(5, i64, 8, most), "token -9223372036854775808 at position 1");
}

TEST(TokenFormat, NamesAsConfigsHaveThem) {
  for (const char* name : {"text", "nanogpt", "llm.c", "megatron"})
    EXPECT_EQ(token_format(name).name, name);
  EXPECT_THAT(usage_error([] { token_format("megatrom"); }),
              ::testing::AllOf(HasSubstr("did you mean 'megatron'?"),
                               HasSubstr("auto, text, nanogpt, llm.c, megatron")));
}

// A format that a program adds: a byte with the number of tokens, then 16-bit tokens.
TokenLayout own_layout(std::span<const TokenBytes> files) {
  const auto& [bytes, path] = files.front();
  check_not_empty(files.front());
  return {TokenType::u16, 1, std::to_integer<std::int64_t>(bytes.front())};
}

TEST(TokenFormat, OfAProgramsOwnIsReadAsAnyOther) {
  add_token_format(
      {.name = "own",
       .recognises = [](const std::filesystem::path& path) { return path.extension() == ".own"; },
       .layout = own_layout});
  const TemporaryFolder folder;
  write_file(folder / "a.own", "\2" + bytes_of(std::vector<std::uint16_t>{300, 400}));
  for (const char* format : {"auto", "own"}) {
    const TokenFile file = TokenFile::open(folder / "a.own", format);
    EXPECT_EQ(file.format().name, "own");
    EXPECT_THAT(all_of(file), ElementsAre(300, 400));
    EXPECT_THAT(file.document_bounds(), ElementsAre(0, 2));
  }
  write_file(folder / "a.bin", "\2" + bytes_of(std::vector<std::uint16_t>{300, 400}));
  EXPECT_THAT(
      usage_error([&] {
        TokenStream::open(std::vector<std::filesystem::path>{folder / "a.own", folder / "a.bin"});
      }),
      HasSubstr("odd number"));
  // The format's layout must not lead out of the file.
  write_file(folder / "a.own", "\3" + bytes_of(std::vector<std::uint16_t>{300, 400}));
  EXPECT_THAT(usage_error([&] { TokenFile::open(folder / "a.own"); }),
              HasSubstr("the format own places tokens outside of the 5 bytes of '"));
}

TEST(TokenFormat, IsAddedWholeAndOnce) {
  const auto adding = [](TokenFormat format) {
    return usage_error([&] { add_token_format(std::move(format)); });
  };
  const TokenFormat whole = token_format("text");
  TokenFormat nameless = whole;
  nameless.name = "";
  TokenFormat blind = whole;
  blind.name = "blind";
  blind.recognises = nullptr;
  TokenFormat mute = whole;
  mute.name = "mute";
  mute.layout = nullptr;
  TokenFormat automatic = whole;
  automatic.name = "auto";
  EXPECT_THAT(adding(whole), HasSubstr("called 'text' already"));
  EXPECT_THAT(adding(automatic), HasSubstr("called 'auto' already"));
  for (const TokenFormat& one : {nameless, blind, mute})
    EXPECT_THAT(adding(one), HasSubstr("it needs a name, `recognises` and `layout`")) << one.name;
}

TEST(TokenLayout, LiesInAFileThatHasAllOfItsBytes) {
  TokenLayout layout(TokenType::i32);
  EXPECT_TRUE(layout.lies_in(0)) << "no tokens";
  layout.append(8, 2);
  EXPECT_TRUE(layout.lies_in(16));
  EXPECT_FALSE(layout.lies_in(15));
  layout.append(2, 1);
  EXPECT_TRUE(layout.lies_in(16));
  layout.append(20, 1);
  EXPECT_FALSE(layout.lies_in(16));
  EXPECT_FALSE(TokenLayout(TokenType::u8, -1, 2).lies_in(16));
  constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
  EXPECT_FALSE(TokenLayout(TokenType::i64, 8, most).lies_in(16));
  EXPECT_FALSE(TokenLayout(TokenType::u8, most, 1).lies_in(16));
}

TEST(TokenStream, IsTheFilesOneAfterTheOther) {
  const TemporaryFolder folder;
  write_file(folder / "a.bin", bytes_of(std::vector<std::uint16_t>{7, 8, 9}));
  write_file(folder / "b.bin", bytes_of(std::vector<std::uint16_t>{1000, 2000}));
  write_file(folder / "c.bin", bytes_of(std::vector<std::uint16_t>{10}));
  const TokenStream stream = TokenStream::open(
      std::vector<std::filesystem::path>{folder / "a.bin", folder / "b.bin", folder / "c.bin"});
  const std::vector<std::int64_t> expected = {7, 8, 9, 1000, 2000, 10};
  EXPECT_EQ(stream.max_token(), 65535);
  for (std::int64_t first = 0; first <= stream.size(); ++first)
    for (std::int64_t count = 0; count <= stream.size() - first; ++count)
      EXPECT_EQ(copied(stream, first, count),
                std::vector(expected.begin() + first, expected.begin() + first + count));
  EXPECT_THAT(usage_error([&] { copied(stream, 5, 2); }), HasSubstr("but 3 files have 6"));
  EXPECT_THAT(usage_error([&] { stream.check_vocabulary(1500); }),
              HasSubstr("token 2000 at position 1 of"));
  stream.check_vocabulary(2001);
  EXPECT_THAT(usage_error([] { TokenStream::open({}); }), HasSubstr("no token files"));
}

TEST(TokenStream, HasOneFormatAndOneTypeOfTokens) {
  const TemporaryFolder folder;
  const std::string tokens = bytes_of(std::vector<std::uint16_t>{1, 2, 3, 4});
  write_file(folder / "a.txt", "abc");
  write_file(folder / "b.bin", tokens);
  write_file(folder / "gpt2.bin", llm_c_header(20240520, 1, 4) + tokens);
  write_file(folder / "llama3.bin", llm_c_header(20240801, 7, 2) + tokens);
  write_file(folder / "m.bin", tokens);
  write_file(folder / "m.idx", IndexFile::contiguous(8, 2, {4}).bytes());
  write_file(folder / "wide.bin", tokens);
  write_file(folder / "wide.idx", IndexFile::contiguous(4, 4, {2}).bytes());
  const auto refused = [&](const char* one, const char* other) {
    return usage_error([&] {
      TokenStream::open(
          std::vector<std::filesystem::path>{folder / one, folder / one, folder / other});
    });
  };
  const std::string path = folder.path().string();
  EXPECT_THAT(refused("a.txt", "b.bin"),
              ::testing::StartsWith("'" + path + "/a.txt' is read as text (8-bit tokens) and '" +
                                    path + "/b.bin' as nanogpt (16-bit tokens), and one model"));
  // A pair without its .idx is taken for a nanoGPT file.
  EXPECT_THAT(refused("m.bin", "b.bin"), HasSubstr("m.bin' is read as megatron (16-bit tokens)"));
  EXPECT_THAT(refused("b.bin", "gpt2.bin"), HasSubstr("gpt2.bin' as llm.c (16-bit tokens)"));
  EXPECT_THAT(refused("gpt2.bin", "llama3.bin"), HasSubstr("llama3.bin' as llm.c (32-bit tokens)"));
  EXPECT_THAT(refused("m", "wide"), HasSubstr("wide.bin' as megatron (signed 32-bit tokens)"));
  const std::vector<std::filesystem::path> said = {folder / "a.txt", folder / "b.bin"};
  EXPECT_EQ(TokenStream::open(said, "text").size(), 11);
}

}  // namespace
}  // namespace lockstep::data
