#include <lockstep/train/preflight/data_digest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include <nlohmann/json.hpp>

#include <lockstep/base/error.h>
#include <lockstep/base/hash.h>

namespace lockstep::train {

namespace {

constexpr std::int64_t kBlockTokens = 4096;
constexpr std::int64_t kMostBlocks = 256;

}  // namespace

DataDigest digest(const data::TokenStream& stream) {
  const std::int64_t size = stream.size();
  const std::int64_t num_blocks =
      std::clamp<std::int64_t>((size + kBlockTokens - 1) / kBlockTokens, 1, kMostBlocks);
  const std::int64_t last = std::max<std::int64_t>(size - kBlockTokens, 0);
  DataDigest result{.num_tokens = size};
  std::vector<std::int64_t> tokens;
  for (std::int64_t block = 0; block < num_blocks; ++block) {
    // Divided first: the product of a large file's size and a number of blocks may not fit.
    const std::int64_t steps = std::max<std::int64_t>(num_blocks - 1, 1);
    const std::int64_t first = last / steps * block + last % steps * block / steps;
    tokens.resize(static_cast<std::size_t>(std::min(kBlockTokens, size - first)));
    stream.copy(first, tokens);
    result.crc32c = crc32c(std::as_bytes(std::span(tokens)), result.crc32c);
  }
  return result;
}

std::string to_text(const DataDigest& digest) {
  return nlohmann::ordered_json{{"num_tokens", digest.num_tokens}, {"crc32c", digest.crc32c}}.dump(
             2) +
         "\n";
}

DataDigest parse_digest(std::string_view text, const std::string& file) {
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  // Whatever else a number is, converting it would give another one, or anything.
  const auto whole_number = [&](const char* key, std::uint64_t largest) {
    const auto found = json.is_object() ? json.find(key) : json.end();
    if (found == json.end() || !found->is_number_unsigned() ||
        found->get<std::uint64_t>() > largest)
      throw UsageError(
          "'{}' does not say what a run was trained on: it must be a JSON object whose "
          "{} is a whole number from 0 to {}",
          file, key, largest);
    return found->get<std::uint64_t>();
  };
  return {.num_tokens = static_cast<std::int64_t>(
              whole_number("num_tokens", std::numeric_limits<std::int64_t>::max())),
          .crc32c = static_cast<std::uint32_t>(
              whole_number("crc32c", std::numeric_limits<std::uint32_t>::max()))};
}

}  // namespace lockstep::train
