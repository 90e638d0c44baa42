#include <lockstep/checkpoint/safetensors/quote.h>

#include <algorithm>
#include <cstddef>

#include <spdlog/fmt/fmt.h>
#include <spdlog/fmt/ranges.h>

namespace lockstep::checkpoint {

namespace {

constexpr std::size_t kLongestText = 120;
constexpr std::size_t kMostDimsShown = 12;
constexpr std::size_t kNamesShown = 5;

}  // namespace

std::string quote(std::string_view text) {
  std::size_t shown = std::min(text.size(), kLongestText);
  // Not in the middle of a character.
  while (shown > 0 && shown < text.size() && (text[shown] & 0xc0) == 0x80) --shown;
  std::string result = "'";
  for (const char c : text.substr(0, shown)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f)
      result += fmt::format("\\x{:02x}", byte);
    else
      result += c;
  }
  if (shown < text.size()) result += fmt::format("… ({} bytes)", text.size());
  return result + "'";
}

std::string shape_text(std::span<const std::int64_t> shape) {
  const auto shown = shape.first(std::min(shape.size(), kMostDimsShown));
  const char* const rest = shown.size() < shape.size() ? ", …" : "";
  return fmt::format("[{}{}]", fmt::join(shown, ", "), rest);
}

void Mismatches::add(const std::string& text) {
  if (count_++ < kNamesShown) shown_ += (shown_.empty() ? "" : ", ") + text;
}

std::string Mismatches::text() const {
  if (!any()) return "";
  return fmt::format("\n  {} {}: {}{}", count_, kind_, shown_, count_ > kNamesShown ? ", …" : "");
}

}  // namespace lockstep::checkpoint
