// The header of a safetensors file. It may come from anywhere: everything it says is checked before
// it is believed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/checkpoint/safetensors/entry.h>

namespace lockstep::checkpoint {

// What its JSON may measure.
inline constexpr std::uint64_t kLargestHeaderBytes = 100'000'000;

// Texts about the whole file: {"format": "pt"}.
using Metadata = std::map<std::string, std::string>;

struct SafetensorsHeader {
  std::vector<TensorEntry> entries;  // ascending and without a gap in the file
  std::vector<std::size_t> by_name;  // positions in `entries`, in the order of names
  Metadata metadata;
  std::uint64_t data_offset = 0;  // of the first tensor's bytes in the file

  // Nothing where there is none of that name.
  const TensorEntry* find(std::string_view name) const;
};

// Of a whole file's bytes. A UsageError names the file (`file` is only for that), the tensor and
// what is wrong with it, for: a header that is cut off, too long or no JSON of this form, names or
// keys that are there twice, types that do not exist, shapes that do not fit their bytes, bytes
// that overlap, leave a gap or do not end where the file does.
SafetensorsHeader parse_header(std::span<const std::byte> bytes, std::string_view file);
// The same of the first bytes of a file of so many, of which the header is all that is looked at.
SafetensorsHeader parse_header(std::span<const std::byte> bytes, std::uint64_t file_bytes,
                               std::string_view file);

}  // namespace lockstep::checkpoint
