#include <lockstep/data/tokens/token_file.h>

#include <utility>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/base/nearest.h>
#include <lockstep/data/tokens/token_formats.h>

namespace lockstep::data {

namespace fs = std::filesystem;

namespace {

constexpr std::pair<TokenFormat, std::string_view> formats[] = {
    {TokenFormat::automatic, "auto"},    {TokenFormat::bytes, "text"},
    {TokenFormat::nanogpt, "nanogpt"},   {TokenFormat::llm_c, "llm.c"},
    {TokenFormat::megatron, "megatron"},
};

// Whether nothing is there; what is there and cannot be looked at is for MappedFile to explain.
bool missing(const fs::path& path) {
  std::error_code ignored;
  return fs::status(path, ignored).type() == fs::file_type::not_found;
}

MappedFile map(const fs::path& path) {
  if (missing(path))
    throw UsageError(
        "there is no token file '{}' (in folder '{}'): give a text file, a .bin of nanoGPT or "
        "llm.c, or Megatron's pair of .bin and .idx",
        path.string(), fs::current_path().string());
  return MappedFile(path);
}

struct MegatronPair {
  fs::path tokens;
  fs::path index;
};

// The pair a path stands for, there or not: one of its two files, or their name without ending.
MegatronPair megatron_pair(const fs::path& path) {
  fs::path stem = path;
  if (path.extension() == ".bin" || path.extension() == ".idx") stem.replace_extension();
  MegatronPair pair{.tokens = stem, .index = stem};
  pair.tokens += ".bin";
  pair.index += ".idx";
  return pair;
}

bool is_megatron(const fs::path& path, const MegatronPair& pair) {
  if (missing(pair.index)) return false;
  const fs::path ending = path.extension();
  return ending == ".bin" || ending == ".idx" || missing(path);
}

TokenFormat recognise(const MappedFile& file) {
  if (is_llm_c(file.bytes())) return TokenFormat::llm_c;
  return file.path().extension() == ".bin" ? TokenFormat::nanogpt : TokenFormat::bytes;
}

TokenLayout read_layout(const MappedFile& file, TokenFormat format) {
  switch (format) {
    case TokenFormat::bytes: return bytes_layout(file.bytes(), file.path());
    case TokenFormat::nanogpt: return nanogpt_layout(file.bytes(), file.path());
    case TokenFormat::llm_c: return llm_c_layout(file.bytes(), file.path());
    case TokenFormat::automatic:
    case TokenFormat::megatron: break;
  }
  LOCKSTEP_CHECK(false, "{} is no format of one file", token_format_name(format));
  std::abort();
}

}  // namespace

const char* token_format_name(TokenFormat format) {
  for (const auto& [known, name] : formats)
    if (known == format) return name.data();
  return "an unknown format";
}

TokenFormat token_format_named(std::string_view name) {
  std::vector<std::string_view> names;
  for (const auto& [format, known] : formats) {
    if (known == name) return format;
    names.push_back(known);
  }
  throw UsageError("'{}' is no format of token files{} (there are {})", name,
                   did_you_mean(name, names), fmt::join(names, ", "));
}

TokenFile::TokenFile(TokenFormat format, MappedFile tokens, TokenLayout layout)
    : format_(format), tokens_(std::move(tokens)), layout_(std::move(layout)) {}

TokenFile TokenFile::open(const fs::path& path, TokenFormat format) {
  const MegatronPair pair = megatron_pair(path);
  if (format == TokenFormat::megatron ||
      (format == TokenFormat::automatic && is_megatron(path, pair)))
    return open_megatron(pair.tokens, pair.index);
  MappedFile file = map(path);
  if (format == TokenFormat::automatic) format = recognise(file);
  TokenLayout layout = read_layout(file, format);
  return {format, std::move(file), std::move(layout)};
}

TokenFile TokenFile::open_megatron(const fs::path& tokens, const fs::path& index) {
  for (const auto& [file, other] : {std::pair(&tokens, &index), std::pair(&index, &tokens)})
    if (missing(*file))
      throw UsageError(
          "there is no '{}': Megatron's token files are pairs of .bin and .idx; put it beside '{}'",
          file->string(), other->string());
  MappedFile mapped(tokens);
  MappedFile mapped_index(index);
  MegatronIndex read(mapped_index.bytes(), index, static_cast<std::int64_t>(mapped.size()));
  TokenFile file(TokenFormat::megatron, std::move(mapped), read.layout());
  file.index_ = std::move(mapped_index);
  return file;
}

void TokenFile::copy(std::int64_t first, std::span<std::int64_t> tokens) const {
  if (first < 0 || first > size() || std::ssize(tokens) > size() - first)
    throw UsageError("asked for {} tokens from position {} on, but '{}' has {}", tokens.size(),
                     first, path().string(), size());
  layout_.copy(tokens_.bytes(), first, tokens);
}

void TokenFile::check_vocabulary(std::int64_t vocabulary_size) const {
  const auto outside = layout_.first_outside(tokens_.bytes(), vocabulary_size);
  if (!outside) return;
  throw UsageError(
      "token {} at position {} of '{}' ({}) is outside of the vocabulary of {}: train with the "
      "vocabulary size of the tokenizer that wrote the file, or say which format the file has",
      outside->token, outside->position, path().string(), token_format_name(format_),
      vocabulary_size);
}

std::vector<std::int64_t> TokenFile::document_bounds() const {
  if (format_ != TokenFormat::megatron) return {0, size()};
  return MegatronIndex(index_.bytes(), index_.path(), static_cast<std::int64_t>(tokens_.size()))
      .document_bounds();
}

}  // namespace lockstep::data
