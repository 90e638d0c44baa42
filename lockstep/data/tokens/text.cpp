// Text: each byte is a token. Any file can be read so.
#include <lockstep/data/tokens/token_format.h>

namespace lockstep::data {

namespace {

bool is_text(const std::filesystem::path& /*path*/) { return true; }

TokenLayout text_layout(std::span<const TokenBytes> files) {
  check_not_empty(files.front());
  return {TokenType::u8, 0, std::ssize(files.front().bytes)};
}

}  // namespace

TokenFormat text_format() { return {.name = "text", .recognises = is_text, .layout = text_layout}; }

}  // namespace lockstep::data
