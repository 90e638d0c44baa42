// What a run was trained on, in a few words: kept in its checkpoints, and compared when it goes on.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include <lockstep/data/tokens/sequences.h>

namespace lockstep::train {

// The file of a checkpoint that holds it.
inline constexpr const char* kDataFile = "data.json";

struct DataDigest {
  std::int64_t num_tokens = 0;
  // A checksum of the first tokens, the last, and blocks at even distances between: as quick for a
  // terabyte as for a megabyte. Small files are read whole; in large ones a change may lie between
  // the blocks.
  std::uint32_t crc32c = 0;

  bool operator==(const DataDigest&) const = default;
};

DataDigest digest(const data::TokenStream& stream);

std::string to_text(const DataDigest& digest);

// UsageError that names `file` where the text is none.
DataDigest parse_digest(std::string_view text, const std::string& file);

}  // namespace lockstep::train
