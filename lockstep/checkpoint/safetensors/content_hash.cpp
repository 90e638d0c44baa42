#include <lockstep/checkpoint/safetensors/content_hash.h>

#include <charconv>

#include <spdlog/fmt/fmt.h>

// Its functions become this file's own: there is no library to find at run time.
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace lockstep::checkpoint {

std::string ContentHash::text() const { return fmt::format("{:016x}{:016x}", high, low); }

std::optional<ContentHash> ContentHash::parse(std::string_view text) {
  constexpr std::size_t kHalf = 16;
  if (text.size() != 2 * kHalf) return std::nullopt;
  const auto half = [](std::string_view digits) -> std::optional<std::uint64_t> {
    std::uint64_t value = 0;
    const char* const end = digits.data() + digits.size();
    const auto [stopped, error] = std::from_chars(digits.data(), end, value, 16);
    if (error != std::errc() || stopped != end) return std::nullopt;
    return value;
  };
  const auto high = half(text.substr(0, kHalf));
  const auto low = half(text.substr(kHalf));
  if (!high || !low) return std::nullopt;
  const ContentHash hash{*high, *low};
  // One spelling each: a flipped bit in a letter's case is damage, too.
  if (hash.text() != text) return std::nullopt;
  return hash;
}

ContentHash content_hash(std::span<const std::byte> bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return {hash.high64, hash.low64};
}

ContentHash content_hash(std::string_view text) {
  return content_hash(std::as_bytes(std::span(text)));
}

}  // namespace lockstep::checkpoint
