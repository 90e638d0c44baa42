#include <lockstep/data/tokens/token_stream.h>

#include <algorithm>
#include <limits>
#include <utility>

#include <lockstep/base/error.h>

namespace lockstep::data {

void check_same_tokens(const TokenFile& one, const TokenFile& other) {
  if (&one.format() == &other.format() && one.type() == other.type()) return;
  throw UsageError(
      "'{}' is read as {} ({} tokens) and '{}' as {} ({} tokens), and one model cannot learn from "
      "both: prepare them alike, with one tokenizer, or say which format they have (data.format) "
      "where one was taken for what it is not",
      one.path().string(), one.format().name, token_type_name(one.type()), other.path().string(),
      other.format().name, token_type_name(other.type()));
}

TokenStream::TokenStream(std::vector<TokenFile> files) : files_(std::move(files)) {
  if (files_.empty()) throw UsageError("there are no token files: give at least one");
  std::int64_t end = 0;
  for (const TokenFile& file : files_) {
    check_same_tokens(files_.front(), file);
    if (file.size() > std::numeric_limits<std::int64_t>::max() - end)
      throw UsageError("the token files up to '{}' have more tokens than can be counted",
                       file.path().string());
    end += file.size();
    ends_.push_back(end);
  }
}

TokenStream TokenStream::open(std::span<const std::filesystem::path> paths,
                              std::string_view format) {
  std::vector<TokenFile> files;
  for (const auto& path : paths) files.push_back(TokenFile::open(path, format));
  return TokenStream(std::move(files));
}

void TokenStream::copy(std::int64_t first, std::span<std::int64_t> tokens) const {
  if (first < 0 || first > size() || std::ssize(tokens) > size() - first)
    throw UsageError("asked for {} tokens from position {} on, but {} files have {}", tokens.size(),
                     first, files_.size(), size());
  auto file =
      static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), first) - ends_.begin());
  while (!tokens.empty()) {
    const std::int64_t begin = file == 0 ? 0 : ends_[file - 1];
    const auto count =
        static_cast<std::size_t>(std::min<std::int64_t>(std::ssize(tokens), ends_[file] - first));
    files_[file].copy(first - begin, tokens.first(count));
    tokens = tokens.subspan(count);
    first += static_cast<std::int64_t>(count);
    ++file;
  }
}

std::int64_t TokenStream::max_token() const { return files_.front().max_token(); }

void TokenStream::check_vocabulary(std::int64_t vocabulary_size) const {
  for (const TokenFile& file : files_) file.check_vocabulary(vocabulary_size);
}

}  // namespace lockstep::data
