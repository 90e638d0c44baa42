#include <lockstep/data/tokens/token_formats.h>

#include <cstring>
#include <optional>

#include <lockstep/base/error.h>

namespace lockstep::data {

namespace {

constexpr std::size_t llm_c_header_bytes = 1024;

struct LlmC {
  std::int32_t magic;
  std::int32_t version;
  TokenType type;
};
constexpr LlmC llm_c_kinds[] = {
    {.magic = 20240520, .version = 1, .type = TokenType::u16},
    {.magic = 20240801, .version = 7, .type = TokenType::u32},
};

std::int32_t header_word(std::span<const std::byte> file, std::size_t word) {
  std::int32_t value = 0;
  std::memcpy(&value, file.data() + word * sizeof value, sizeof value);
  return value;
}

std::optional<LlmC> llm_c_kind(std::span<const std::byte> file) {
  if (file.size() < sizeof(std::int32_t)) return std::nullopt;
  for (const LlmC& kind : llm_c_kinds)
    if (header_word(file, 0) == kind.magic) return kind;
  return std::nullopt;
}

void check_not_empty(std::span<const std::byte> file, const std::filesystem::path& path) {
  if (file.empty())
    throw UsageError("token file '{}' is empty: was it written to the end?", path.string());
}

}  // namespace

TokenLayout bytes_layout(std::span<const std::byte> file, const std::filesystem::path& path) {
  check_not_empty(file, path);
  return {TokenType::u8, 0, std::ssize(file)};
}

TokenLayout nanogpt_layout(std::span<const std::byte> file, const std::filesystem::path& path) {
  check_not_empty(file, path);
  if (file.size() % 2 != 0)
    throw UsageError(
        "token file '{}' has {} bytes, an odd number, so it is not nanoGPT's 16-bit tokens: write "
        "it again if it was cut short, or say which format it has ('text' for text, "
        "which is read byte by byte)",
        path.string(), file.size());
  return {TokenType::u16, 0, std::ssize(file) / 2};
}

bool is_llm_c(std::span<const std::byte> file) { return llm_c_kind(file).has_value(); }

TokenLayout llm_c_layout(std::span<const std::byte> file, const std::filesystem::path& path) {
  check_not_empty(file, path);
  const std::string name = path.string();
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

}  // namespace lockstep::data
