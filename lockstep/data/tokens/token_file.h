// A file of tokens, mapped into memory: text, or what nanoGPT, llm.c and Megatron-LM prepare.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include <lockstep/base/mapped_file.h>
#include <lockstep/data/tokens/megatron_index.h>
#include <lockstep/data/tokens/token_layout.h>

namespace lockstep::data {

enum class TokenFormat {
  automatic,  // Megatron's where a .idx lies beside it, llm.c's by its magic number, nanoGPT's
              // where the name ends in .bin, and bytes otherwise
  bytes,      // each byte is a token: text
  nanogpt,    // headerless 16-bit tokens
  llm_c,      // a header, then 16-bit (GPT-2) or 32-bit tokens (Llama 3)
  megatron,   // a pair of .bin and .idx; either name, or the two without their endings
};

// "auto", "text", "nanogpt", "llm.c", "megatron": as configs have them.
const char* token_format_name(TokenFormat format);
// UsageError that lists them where the name is none.
TokenFormat token_format_named(std::string_view name);

// Ownership: holds the mapping; no token is read before it is asked for. Threading: read-only.
// Failure: UsageError naming the file, the place, what was found and what to do, for files that
// are missing, unreadable, empty or not what they claim to be.
class TokenFile {
 public:
  static TokenFile open(const std::filesystem::path& path,
                        TokenFormat format = TokenFormat::automatic);

  // Never automatic.
  TokenFormat format() const { return format_; }
  // Where the tokens are; Megatron's .bin.
  const std::filesystem::path& path() const { return tokens_.path(); }
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
  TokenFile(TokenFormat format, MappedFile tokens, TokenLayout layout);

  static TokenFile open_megatron(const std::filesystem::path& tokens,
                                 const std::filesystem::path& index);

  TokenFormat format_;
  MappedFile tokens_;
  TokenLayout layout_;
  MappedFile index_;  // Megatron's
};

}  // namespace lockstep::data
