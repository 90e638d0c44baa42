// A file of tokens, mapped into memory, in any format of the table in token_format.h.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>
#include <vector>

#include <lockstep/base/file.h>
#include <lockstep/data/tokens/token_format.h>

namespace lockstep::data {

// Ownership: holds the mapping; no token is read before it is asked for. Threading: read-only.
// Failure: UsageError naming the file, the place, what was found and what to do, for files that
// are missing, unreadable, empty or not what they claim to be.
class TokenFile {
 public:
  // `format` is a name of the table, or "auto".
  static TokenFile open(const std::filesystem::path& path,
                        std::string_view format = kAutomaticFormat);

  const TokenFormat& format() const { return *format_; }
  // Where the tokens are; Megatron's .bin.
  const std::filesystem::path& path() const { return files_.front().path(); }
  std::int64_t size() const { return layout_.size(); }

  // Tokens [first, first + tokens.size()). UsageError where there are not that many.
  void copy(std::int64_t first, std::span<std::int64_t> tokens) const;

  TokenType type() const { return layout_.type(); }
  // The largest token that this file's type could hold; the file need not have it.
  std::int64_t max_token() const { return data::max_token(type()); }

  // Reads every token, unless the type alone says that they fit. UsageError naming the first that
  // is not in [0, vocabulary_size) and its position.
  void check_vocabulary(std::int64_t vocabulary_size) const;

  // The position of each document's first token, and at the end size(). A file without an index is
  // one document.
  std::vector<std::int64_t> document_bounds() const;

 private:
  TokenFile(const TokenFormat& format, std::vector<MappedFile> files);

  const TokenFormat* format_;
  std::vector<MappedFile> files_;  // the one with the tokens first
  TokenLayout layout_;
};

}  // namespace lockstep::data
