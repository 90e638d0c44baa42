// The hash that tells whether bytes on a disk are as they were written: XXH3, 128 bits. It finds
// any damage, but does not protect against someone who forges files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace lockstep::checkpoint {

struct ContentHash {
  std::uint64_t high = 0;
  std::uint64_t low = 0;

  bool operator==(const ContentHash&) const = default;

  // 32 hexadecimal digits.
  std::string text() const;
  // Nothing where it is not such a text.
  static std::optional<ContentHash> parse(std::string_view text);
};

ContentHash content_hash(std::span<const std::byte> bytes);
ContentHash content_hash(std::string_view text);

}  // namespace lockstep::checkpoint
