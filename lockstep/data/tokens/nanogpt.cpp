// nanoGPT's files: 16-bit tokens without a header. Their names end in .bin.
#include <lockstep/base/error.h>
#include <lockstep/data/tokens/token_format.h>

namespace lockstep::data {

namespace {

bool is_nanogpt(const std::filesystem::path& path) { return path.extension() == ".bin"; }

TokenLayout nanogpt_layout(std::span<const TokenBytes> files) {
  const auto& [bytes, path] = files.front();
  check_not_empty(files.front());
  if (bytes.size() % 2 != 0)
    throw UsageError(
        "token file '{}' has {} bytes, an odd number, so it is not nanoGPT's 16-bit tokens: write "
        "it again if it was cut short, or say which format it has ('text' for text, "
        "which is read byte by byte)",
        path.string(), bytes.size());
  return {TokenType::u16, 0, std::ssize(bytes) / 2};
}

}  // namespace

TokenFormat nanogpt_format() {
  return {.name = "nanogpt",
          .note = ".bin, no header",
          .recognises = is_nanogpt,
          .layout = nanogpt_layout};
}

}  // namespace lockstep::data
