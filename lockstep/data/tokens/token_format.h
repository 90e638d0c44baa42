// The formats of token files. They are rows of one table, to which a program may add its own;
// nothing else compares names of formats.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::data {

enum class TokenType : std::uint8_t { u8, i8, u16, i16, u32, i32, i64 };

int item_bytes(TokenType type);
// The largest token the type can hold.
std::int64_t max_token(TokenType type);
// "16-bit", "signed 32-bit"
std::string token_type_name(TokenType type);

struct PlacedToken {
  std::int64_t position = 0;
  std::int64_t token = 0;

  bool operator==(const PlacedToken&) const = default;
};

// Where the tokens of a file lie in its bytes: tokens of one type in one or more runs, numbered in
// the runs' order. A value; holds no bytes; lies_in() tells whether a file has all of them. Memory
// grows with the runs that do not follow each other, not with the tokens. Little-endian, any
// alignment.
class TokenLayout {
 public:
  explicit TokenLayout(TokenType type) : type_(type) {}
  // `count` tokens in one run.
  TokenLayout(TokenType type, std::int64_t first_byte, std::int64_t count);

  // `count` more tokens, from `first_byte` on.
  void append(std::int64_t first_byte, std::int64_t count);

  TokenType type() const { return type_; }
  std::int64_t size() const { return size_; }
  std::size_t num_runs() const { return runs_.size(); }

  // Whether all tokens lie in a file of `file_bytes` bytes.
  bool lies_in(std::uint64_t file_bytes) const;

  // Tokens [first, first + tokens.size()) of `file`, which must be among those there are.
  void copy(std::span<const std::byte> file, std::int64_t first,
            std::span<std::int64_t> tokens) const;

  // The first token of `file` that is not in [0, vocabulary_size).
  std::optional<PlacedToken> first_outside(std::span<const std::byte> file,
                                           std::int64_t vocabulary_size) const;

 private:
  struct Run {
    std::int64_t first_token;
    std::int64_t first_byte;
  };

  std::int64_t end_of(std::size_t run) const {
    return run + 1 < runs_.size() ? runs_[run + 1].first_token : size_;
  }

  TokenType type_;
  std::vector<Run> runs_;  // ascending in first_token, none empty
  std::int64_t size_ = 0;
};

// A file's contents, and its path for messages.
struct TokenBytes {
  std::span<const std::byte> bytes;
  std::filesystem::path path;
};

// A format: how its files are found and recognised, and where their tokens lie. The functions hold
// no state and may be called from any thread.
struct TokenFormat {
  // The name in configs and messages: "llm.c".
  std::string name;
  // Shown in parentheses after the name: ".bin, no header". May be empty.
  std::string note = {};

  // The files that `path` stands for, whether they exist or not. The first one holds the tokens.
  // Null for formats of one file, which is `path` itself.
  std::vector<std::filesystem::path> (*files)(const std::filesystem::path& path) = nullptr;

  // Whether "auto" takes `path` for this format. Must not throw: false where the file is missing or
  // cannot be read.
  bool (*recognises)(const std::filesystem::path& path) = nullptr;

  // Where the tokens lie in the first file. Throws a UsageError, which names the file, the place,
  // what was found and what to do, where the files are not of this format.
  TokenLayout (*layout)(std::span<const TokenBytes> files) = nullptr;

  // The position of each document's first token, and at the end the number of tokens. Null for
  // formats that do not store this: a file is one document then.
  std::vector<std::int64_t> (*document_bounds)(std::span<const TokenBytes> files) = nullptr;
};

// The word that leaves the choice to the table: the last row that recognises a file reads it.
inline constexpr std::string_view kAutomaticFormat = "auto";

// All rows in order: first the formats of this library, from the least to the most specific, then
// those that were added. The pointers stay valid. Thread-safe.
std::vector<const TokenFormat*> token_formats();

// Adds a row. Call this before a config is read or a file is opened. Throws a UsageError where the
// name is empty, taken or "auto", or where `recognises` or `layout` is missing. Thread-safe.
void add_token_format(TokenFormat format);

// The format of this name. Throws a UsageError that lists all names where there is none.
const TokenFormat& token_format(std::string_view name);

// The format to read `path` with: the named one, or with "auto" the last that recognises it.
const TokenFormat& token_format_of(const std::filesystem::path& path, std::string_view name);

// The files that `path` stands for in a format; the one with the tokens comes first.
std::vector<std::filesystem::path> files_of(const std::filesystem::path& path,
                                            const TokenFormat& format);

// "text, nanogpt (.bin, no header), …": every name with its note.
std::string list_token_formats();

// For layout(): throws a UsageError where the file is empty.
void check_not_empty(const TokenBytes& file);

}  // namespace lockstep::data
