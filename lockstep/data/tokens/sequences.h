// Token files, several of them as one stream of tokens, and the training sequences that the stream
// is cut into.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include <lockstep/base/file.h>
#include <lockstep/data/tokens/token_format.h>

namespace lockstep::data {

// A file of tokens, mapped into memory, in any format of the table in token_format.h.
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

// Throws a UsageError that names both files and their formats, where the formats or the types of
// the tokens differ: the same number then means another token in each file.
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

  // As TokenFile's, over all files.
  std::int64_t max_token() const;
  void check_vocabulary(std::int64_t vocabulary_size) const;

 private:
  std::vector<TokenFile> files_;
  std::vector<std::int64_t> ends_;  // position after the last token of each
};

// Training sequences: windows of one length over a stream of tokens. Sequence k is tokens [k·L, k·L
// + L]: L inputs, and as targets the same shifted by one. Every token but the first is a target at
// most once; a remainder shorter than L is left out.
//
// Ownership: shares the stream; cheap to copy. Threading: read-only. Failure: UsageError with the
// numbers.
class SequenceSet {
 public:
  // UsageError where the stream is too short for one sequence.
  SequenceSet(std::shared_ptr<const TokenStream> stream, std::int64_t length);

  std::int64_t size() const { return size_; }
  std::int64_t length() const { return length_; }
  const TokenStream& stream() const { return *stream_; }

  // Copies the inputs or the targets of sequence `index`: length() tokens each.
  void copy_input(std::int64_t index, std::span<std::int64_t> tokens) const;
  void copy_target(std::int64_t index, std::span<std::int64_t> tokens) const;

  struct Split;
  // The last `validation_fraction` of the sequences, to the nearest whole number, for validation
  // and those before them for training. No target of one side is a target of the other. UsageError
  // where a side would be empty.
  Split split(double validation_fraction) const;

 private:
  SequenceSet(std::shared_ptr<const TokenStream> stream, std::int64_t length, std::int64_t first,
              std::int64_t size);

  void copy(std::int64_t index, std::int64_t shift, std::span<std::int64_t> tokens) const;

  std::shared_ptr<const TokenStream> stream_;
  std::int64_t length_;
  std::int64_t first_ = 0;  // the stream's first token of sequence 0
  std::int64_t size_ = 0;
};

struct SequenceSet::Split {
  SequenceSet train;
  SequenceSet validation;
};

}  // namespace lockstep::data
