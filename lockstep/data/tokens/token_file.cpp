#include <lockstep/data/tokens/token_file.h>

#include <utility>

#include <lockstep/base/error.h>

namespace lockstep::data {

namespace fs = std::filesystem;

namespace {

// A file that exists but cannot be looked at counts as there: MappedFile then says why.
void check_there(const std::vector<fs::path>& files, const TokenFormat& format) {
  for (std::size_t i = 0; i < files.size(); ++i) {
    std::error_code ignored;
    if (fs::status(files[i], ignored).type() != fs::file_type::not_found) continue;
    if (files.size() == 1)
      throw UsageError("there is no token file '{}' (in folder '{}'): give a file in one of these "
                       "formats: {}",
                       files[i].string(), fs::current_path().string(), list_token_formats());
    throw UsageError("there is no '{}': a token file of the format {} consists of {} files; put it "
                     "beside '{}'",
                     files[i].string(), format.name, files.size(), files[i == 0 ? 1 : 0].string());
  }
}

std::vector<TokenBytes> bytes_of(const std::vector<MappedFile>& files) {
  std::vector<TokenBytes> all;
  for (const MappedFile& file : files) all.push_back({file.bytes(), file.path()});
  return all;
}

// A format may come from outside of this library.
TokenLayout checked_layout(const TokenFormat& format, const std::vector<MappedFile>& files) {
  TokenLayout layout = format.layout(bytes_of(files));
  if (!layout.lies_in(files.front().size()))
    throw UsageError("the format {} places tokens outside of the {} bytes of '{}': its layout() is "
                     "wrong",
                     format.name, files.front().size(), files.front().path().string());
  return layout;
}

}  // namespace

TokenFile::TokenFile(const TokenFormat& format, std::vector<MappedFile> files)
    : format_(&format), files_(std::move(files)), layout_(checked_layout(format, files_)) {}

TokenFile TokenFile::open(const fs::path& path, std::string_view name) {
  const TokenFormat& format = token_format_of(path, name);
  const std::vector<fs::path> paths = files_of(path, format);
  check_there(paths, format);
  std::vector<MappedFile> files;
  for (const fs::path& one : paths) files.emplace_back(one);
  return {format, std::move(files)};
}

void TokenFile::copy(std::int64_t first, std::span<std::int64_t> tokens) const {
  if (first < 0 || first > size() || std::ssize(tokens) > size() - first)
    throw UsageError("asked for {} tokens from position {} on, but '{}' has {}", tokens.size(),
                     first, path().string(), size());
  layout_.copy(files_.front().bytes(), first, tokens);
}

void TokenFile::check_vocabulary(std::int64_t vocabulary_size) const {
  const auto outside = layout_.first_outside(files_.front().bytes(), vocabulary_size);
  if (!outside) return;
  throw UsageError(
      "token {} at position {} of '{}' ({}) is outside of the vocabulary of {}: train with the "
      "vocabulary size of the tokenizer that wrote the file, or say which format the file has",
      outside->token, outside->position, path().string(), format_->name, vocabulary_size);
}

std::vector<std::int64_t> TokenFile::document_bounds() const {
  if (format_->document_bounds == nullptr) return {0, size()};
  return format_->document_bounds(bytes_of(files_));
}

}  // namespace lockstep::data
