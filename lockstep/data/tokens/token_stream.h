// Several token files as one.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include <lockstep/data/tokens/token_file.h>

namespace lockstep::data {

// UsageError that names both files, with their formats, where these or the types of their tokens
// differ: the same number is then another token in each.
void check_same_tokens(const TokenFile& one, const TokenFile& other);

// The tokens of files, one file after the other. Ownership: holds the files. Threading: read-only.
// Failure: as TokenFile's.
class TokenStream {
 public:
  // UsageError where there is none, or where files have different formats or types of tokens.
  explicit TokenStream(std::vector<TokenFile> files);

  static TokenStream open(std::span<const std::filesystem::path> paths,
                          std::string_view format = kAutomaticFormat);

  const std::vector<TokenFile>& files() const { return files_; }
  std::int64_t size() const { return ends_.back(); }

  // Tokens [first, first + tokens.size()), from as many files as they lie in.
  void copy(std::int64_t first, std::span<std::int64_t> tokens) const;

  // Of all files.
  std::int64_t max_token() const;
  void check_vocabulary(std::int64_t vocabulary_size) const;

 private:
  std::vector<TokenFile> files_;
  std::vector<std::int64_t> ends_;  // position after the last token of each
};

}  // namespace lockstep::data
