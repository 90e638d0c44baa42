#include <lockstep/data/tokens/sequences.h>

#include <algorithm>
#include <cmath>
#include <limits>
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

SequenceSet::SequenceSet(std::shared_ptr<const TokenStream> stream, std::int64_t length)
    : stream_(std::move(stream)), length_(length) {
  if (length_ < 1) throw UsageError("a sequence of {} tokens: sequences have at least 1", length_);
  size_ = (stream_->size() - 1) / length_;
  if (size_ < 1)
    throw UsageError(
        "'{}'{} has {} tokens, but one sequence of length {} takes {} (its targets are shifted by "
        "one): give more text, or a shorter sequence length",
        stream_->files().front().path().string(),
        stream_->files().size() > 1 ? fmt::format(" and {} more", stream_->files().size() - 1) : "",
        stream_->size(), length_, static_cast<std::uint64_t>(length_) + 1);
}

SequenceSet::SequenceSet(std::shared_ptr<const TokenStream> stream, std::int64_t length,
                         std::int64_t first, std::int64_t size)
    : stream_(std::move(stream)), length_(length), first_(first), size_(size) {}

void SequenceSet::copy(std::int64_t index, std::int64_t shift,
                       std::span<std::int64_t> tokens) const {
  if (index < 0 || index >= size_) throw UsageError("asked for sequence {} of {}", index, size_);
  if (std::ssize(tokens) != length_)
    throw UsageError("a place for {} tokens was given for a sequence of {}", tokens.size(),
                     length_);
  stream_->copy(first_ + index * length_ + shift, tokens);
}

void SequenceSet::copy_input(std::int64_t index, std::span<std::int64_t> tokens) const {
  copy(index, 0, tokens);
}

void SequenceSet::copy_target(std::int64_t index, std::span<std::int64_t> tokens) const {
  copy(index, 1, tokens);
}

SequenceSet::Split SequenceSet::split(double validation_fraction) const {
  // Written so that NaN fails, too.
  if (!(validation_fraction > 0 && validation_fraction < 1))
    throw UsageError("a validation fraction of {}: it must lie between 0 and 1, both excluded",
                     validation_fraction);
  const auto validation =
      static_cast<std::int64_t>(std::llround(static_cast<double>(size_) * validation_fraction));
  const std::int64_t train = size_ - validation;
  if (validation < 1 || train < 1)
    throw UsageError(
        "a validation fraction of {} of {} sequences of {} tokens leaves {} for validation and {} "
        "for training: give more text, a shorter sequence length or another fraction",
        validation_fraction, size_, length_, validation, train);
  return {.train = {stream_, length_, first_, train},
          .validation = {stream_, length_, first_ + train * length_, validation}};
}

}  // namespace lockstep::data
