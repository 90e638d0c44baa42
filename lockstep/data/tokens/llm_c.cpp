// llm.c's files: a header of 1024 bytes, then 16-bit tokens (GPT-2) or 32-bit tokens (Llama 3).
#include <cstring>
#include <optional>

#include <lockstep/base/error.h>
#include <lockstep/base/file.h>
#include <lockstep/data/tokens/token_format.h>

namespace lockstep::data {

namespace {

constexpr std::size_t llm_c_header_bytes = 1024;

// A kind of file, which the first word of the header tells.
struct LlmCKind {
  std::int32_t magic;
  std::int32_t version;
  TokenType type;
};
constexpr LlmCKind llm_c_kinds[] = {
    {.magic = 20240520, .version = 1, .type = TokenType::u16},
    {.magic = 20240801, .version = 7, .type = TokenType::u32},
};

std::int32_t header_word(std::span<const std::byte> file, std::size_t word) {
  std::int32_t value = 0;
  std::memcpy(&value, file.data() + word * sizeof value, sizeof value);
  return value;
}

std::optional<LlmCKind> llm_c_kind(std::span<const std::byte> file) {
  if (file.size() < sizeof(std::int32_t)) return std::nullopt;
  for (const LlmCKind& kind : llm_c_kinds)
    if (header_word(file, 0) == kind.magic) return kind;
  return std::nullopt;
}

bool is_llm_c(const std::filesystem::path& path) {
  try {
    return llm_c_kind(MappedFile(path).bytes()).has_value();
  } catch (const UsageError&) {
    return false;
  }
}

TokenLayout llm_c_layout(std::span<const TokenBytes> files) {
  check_not_empty(files.front());
  const std::span<const std::byte> file = files.front().bytes;
  const std::string name = files.front().path.string();
  if (file.size() < llm_c_header_bytes)
    throw UsageError(
        "token file '{}' has {} bytes, but llm.c's header alone has {}: write it again, or say "
        "which format it has",
        name, file.size(), llm_c_header_bytes);
  const auto kind = llm_c_kind(file);
  if (!kind)
    throw UsageError(
        "token file '{}' begins with {}, but llm.c's begin with {} (GPT-2) or {} (Llama 3): say "
        "which format it has, or write it with llm.c's scripts",
        name, header_word(file, 0), llm_c_kinds[0].magic, llm_c_kinds[1].magic);
  const std::int32_t version = header_word(file, 1);
  if (version != kind->version)
    throw UsageError(
        "token file '{}' says version {} at byte 4, but llm.c's files with magic number {} have "
        "version {}: write it with a current llm.c, or say which format it has",
        name, version, kind->magic, kind->version);
  const std::int64_t count = header_word(file, 2);
  const std::int64_t bytes = item_bytes(kind->type);
  const std::int64_t there = std::ssize(file) - static_cast<std::int64_t>(llm_c_header_bytes);
  if (count * bytes != there)
    throw UsageError(
        "token file '{}' says at byte 8 that it has {} tokens of {} bytes, but after its header "
        "there are {} bytes: it was cut short or is still being written; write it again",
        name, count, bytes, there);
  if (count == 0)
    throw UsageError("token file '{}' has a header and no tokens: write it again", name);
  return {kind->type, llm_c_header_bytes, count};
}

}  // namespace

TokenFormat llm_c_format() {
  return {.name = "llm.c", .note = ".bin", .recognises = is_llm_c, .layout = llm_c_layout};
}

}  // namespace lockstep::data
