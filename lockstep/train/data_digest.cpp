#include <lockstep/train/data_digest.h>

#include <algorithm>
#include <vector>

#include <nlohmann/json.hpp>

#include <lockstep/base/crc32c.h>
#include <lockstep/base/error.h>

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
  try {
    const auto json = nlohmann::json::parse(text);
    return {.num_tokens = json.at("num_tokens"), .crc32c = json.at("crc32c")};
  } catch (const nlohmann::json::exception& error) {
    throw UsageError("'{}' does not say what a run was trained on: {}", file, error.what());
  }
}

}  // namespace lockstep::train
