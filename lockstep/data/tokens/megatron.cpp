// Megatron-LM's files: a .bin with the tokens, and beside it an .idx that says which bytes are
// which sequence, and where documents begin.
#include <cstring>
#include <limits>
#include <string>
#include <string_view>

#include <lockstep/base/error.h>
#include <lockstep/data/tokens/token_format.h>

namespace lockstep::data {

namespace {

namespace fs = std::filesystem;
using namespace std::string_view_literals;

constexpr std::string_view magic = "MMIDIDX\0\0"sv;
constexpr std::int64_t version_at = 9;
constexpr std::int64_t type_at = 17;
constexpr std::int64_t num_sequences_at = 18;
constexpr std::int64_t num_documents_at = 26;
constexpr std::int64_t header_bytes = 34;

constexpr const char* write_again = "write both files again with Megatron's preprocess_data";

// The arrays begin at byte 34: nothing in them is aligned.
template <typename T>
T load(std::span<const std::byte> bytes, std::int64_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

TokenType token_type(int code, const std::string& name) {
  switch (code) {
    case 1: return TokenType::u8;
    case 2: return TokenType::i8;
    case 3: return TokenType::i16;
    case 4: return TokenType::i32;
    case 5: return TokenType::i64;
    case 8: return TokenType::u16;
    case 6:
    case 7:
      throw UsageError(
          "Megatron index '{}' says at byte {} that its .bin holds floating-point numbers (type "
          "{}): tokens are integers; give a file of tokens",
          name, type_at, code);
    default:
      throw UsageError("Megatron index '{}' has type {} at byte {}, which is none of 1 to 8: {}",
                       name, code, type_at, write_again);
  }
}

// A count that may be any 64 bits.
std::int64_t count_at(std::span<const std::byte> bytes, std::int64_t offset, const char* what,
                      const std::string& name) {
  const auto count = load<std::uint64_t>(bytes, offset);
  // Each takes eight bytes or more of the file.
  if (count > bytes.size() / 8)
    throw UsageError(
        "Megatron index '{}' says at byte {} that it has {} {}, but it has {} bytes: it was cut "
        "short or is still being written; {}",
        name, offset, count, what, bytes.size(), write_again);
  return static_cast<std::int64_t>(count);
}

// The header up to the type, which the layout is made with.
TokenType checked_type(std::span<const std::byte> bytes, const std::string& name) {
  if (std::ssize(bytes) < header_bytes)
    throw UsageError("Megatron index '{}' has {} bytes, but its header alone has {}: {}", name,
                     bytes.size(), header_bytes, write_again);
  if (std::memcmp(bytes.data(), magic.data(), magic.size()) != 0)
    throw UsageError(
        "'{}' does not begin with MMIDIDX, so it is no Megatron index: {}, or say which format the "
        ".bin beside it has",
        name, write_again);
  const auto version = load<std::uint64_t>(bytes, version_at);
  if (version != 1)
    throw UsageError("Megatron index '{}' says version {} at byte {}; only version 1 is known: {}",
                     name, version, version_at, write_again);
  return token_type(load<std::uint8_t>(bytes, type_at), name);
}

// The contents of an .idx file, which are checked against the sizes of both files before anything
// is believed. A view of the file's bytes, which must outlive it; it owns the layout alone.
class MegatronIndex {
 public:
  // `index` is the whole .idx file, `path` its name for messages, `token_bytes` the .bin's size.
  MegatronIndex(std::span<const std::byte> index, const fs::path& path, std::int64_t token_bytes);

  // The tokens of all sequences, in the index's order.
  const TokenLayout& layout() const { return layout_; }

  // The position of each document's first token, and at the end the number of tokens. Sequences
  // after the last bound in the file are one more document. Read from the file at each call.
  std::vector<std::int64_t> document_bounds() const;

 private:
  std::int32_t length(std::int64_t sequence) const;
  std::int64_t pointer(std::int64_t sequence) const;
  std::int64_t document(std::int64_t number) const;

  void check_sizes(const std::string& name) const;
  void read_sequences(const std::string& name, std::int64_t token_bytes);
  void check_documents(const std::string& name) const;

  std::span<const std::byte> bytes_;
  std::int64_t num_sequences_ = 0;
  std::int64_t num_documents_ = 0;  // as the file counts: one more than there are
  TokenLayout layout_;
};

MegatronIndex::MegatronIndex(std::span<const std::byte> index, const fs::path& path,
                             std::int64_t token_bytes)
    : bytes_(index), layout_(checked_type(index, path.string())) {
  const std::string name = path.string();
  num_sequences_ = count_at(bytes_, num_sequences_at, "sequences", name);
  num_documents_ = count_at(bytes_, num_documents_at, "document bounds", name);
  check_sizes(name);
  check_documents(name);
  read_sequences(name, token_bytes);
}

void MegatronIndex::check_sizes(const std::string& name) const {
  const std::int64_t expected = header_bytes + num_sequences_ * 12 + num_documents_ * 8;
  // A byte a sequence more where it has modes.
  if (std::ssize(bytes_) != expected && std::ssize(bytes_) != expected + num_sequences_)
    throw UsageError(
        "Megatron index '{}' has {} bytes, but with {} sequences and {} document bounds it should "
        "have {} (or {} with modes): it was cut short or is still being written; {}",
        name, bytes_.size(), num_sequences_, num_documents_, expected, expected + num_sequences_,
        write_again);
}

void MegatronIndex::check_documents(const std::string& name) const {
  std::int64_t before = 0;
  for (std::int64_t i = 0; i < num_documents_; ++i) {
    const std::int64_t bound = document(i);
    if (bound < before || bound > num_sequences_ || (i == 0 && bound != 0))
      throw UsageError(
          "Megatron index '{}' says that document {} begins at sequence {}: bounds begin with 0, "
          "ascend and end at the {} sequences there are; {}",
          name, i, bound, num_sequences_, write_again);
    before = bound;
  }
}

void MegatronIndex::read_sequences(const std::string& name, std::int64_t token_bytes) {
  const std::int64_t item = item_bytes(layout_.type());
  for (std::int64_t i = 0; i < num_sequences_; ++i) {
    const std::int64_t count = length(i);
    const std::int64_t first_byte = pointer(i);
    if (count < 0 || first_byte < 0 || first_byte % item != 0 || first_byte > token_bytes ||
        count > (token_bytes - first_byte) / item)
      throw UsageError(
          "Megatron index '{}' says that sequence {} has {} tokens of {} bytes from byte {} on, "
          "but its .bin has {} bytes: the two do not belong together, or one was cut short; {}",
          name, i, count, item, first_byte, token_bytes, write_again);
    if (count > std::numeric_limits<std::int64_t>::max() - layout_.size())
      throw UsageError(
          "Megatron index '{}' has more tokens than can be counted, at sequence {}: {}", name, i,
          write_again);
    layout_.append(first_byte, count);
  }
  if (layout_.size() == 0)
    throw UsageError("Megatron index '{}' has {} sequences and no tokens: {}", name, num_sequences_,
                     write_again);
  if (layout_.num_runs() == 1 && pointer(0) == 0 && layout_.size() * item != token_bytes)
    throw UsageError(
        "Megatron index '{}' has {} tokens of {} bytes, one after the other, but its .bin has {} "
        "bytes: the two do not belong together, or one is still being written; {}",
        name, layout_.size(), item, token_bytes, write_again);
}

std::int32_t MegatronIndex::length(std::int64_t sequence) const {
  return load<std::int32_t>(bytes_, header_bytes + sequence * 4);
}

std::int64_t MegatronIndex::pointer(std::int64_t sequence) const {
  return load<std::int64_t>(bytes_, header_bytes + num_sequences_ * 4 + sequence * 8);
}

std::int64_t MegatronIndex::document(std::int64_t number) const {
  return load<std::int64_t>(bytes_, header_bytes + num_sequences_ * 12 + number * 8);
}

std::vector<std::int64_t> MegatronIndex::document_bounds() const {
  std::vector<std::int64_t> bounds;
  bounds.reserve(static_cast<std::size_t>(num_documents_) + 2);
  std::int64_t sequence = 0;
  std::int64_t position = 0;
  for (std::int64_t i = 0; i < num_documents_; ++i) {
    for (; sequence < document(i); ++sequence) position += length(sequence);
    bounds.push_back(position);
  }
  if (bounds.empty()) bounds.push_back(0);
  if (bounds.back() < layout_.size()) bounds.push_back(layout_.size());
  return bounds;
}

bool is_missing(const fs::path& path) {
  std::error_code ignored;
  return fs::status(path, ignored).type() == fs::file_type::not_found;
}

bool names_one_of_the_pair(const fs::path& path) {
  return path.extension() == ".bin" || path.extension() == ".idx";
}

// The pair is named by one of its two files, or by their name without an ending.
std::vector<fs::path> megatron_files(const fs::path& path) {
  fs::path stem = path;
  if (names_one_of_the_pair(path)) stem.replace_extension();
  return {fs::path(stem) += ".bin", fs::path(stem) += ".idx"};
}

// An .idx is Megatron's, and so is the .bin beside it. A name without an ending is that of a pair
// where no such file exists, but one of the two does.
bool is_megatron(const fs::path& path) {
  const auto pair = megatron_files(path);
  if (names_one_of_the_pair(path)) return path.extension() == ".idx" || !is_missing(pair[1]);
  return is_missing(path) && (!is_missing(pair[0]) || !is_missing(pair[1]));
}

MegatronIndex index_of(std::span<const TokenBytes> files) {
  return {files[1].bytes, files[1].path, std::ssize(files[0].bytes)};
}

TokenLayout megatron_layout(std::span<const TokenBytes> files) { return index_of(files).layout(); }

std::vector<std::int64_t> megatron_document_bounds(std::span<const TokenBytes> files) {
  return index_of(files).document_bounds();
}

}  // namespace

TokenFormat megatron_format() {
  return {.name = "megatron",
          .note = ".bin and .idx; named by either, or without extension",
          .files = megatron_files,
          .recognises = is_megatron,
          .layout = megatron_layout,
          .document_bounds = megatron_document_bounds};
}

}  // namespace lockstep::data
