// Where the tokens of a file lie in its bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
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

// Tokens of one type in one or more runs of a file's bytes, numbered in the runs' order. A value;
// holds no bytes; lies_in() tells whether a file has all of them. Memory grows
// with the runs that do not follow each other, not with the tokens. Little-endian, any alignment.
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

}  // namespace lockstep::data
