// Headers of safetensors files, from whole files and from their JSON alone: two bytes that say how
// much data follows, then the JSON, which gets a length that fits, because mutations would hardly
// ever leave a fitting length.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include <lockstep/base/error.h>
#include <lockstep/checkpoint/safetensors/header.h>
#include <lockstep/checkpoint/safetensors/writer.h>

#include "target.h"

namespace lockstep::fuzz {

namespace {

using checkpoint::SafetensorsHeader;
using checkpoint::TensorEntry;

// A header that was read can be written, and read again.
void check_round_trip(const SafetensorsHeader& header) {
  std::vector<checkpoint::TensorDeclaration> declarations;
  for (const TensorEntry& entry : header.entries)
    declarations.push_back({entry.name, entry.dtype, entry.shape});
  const auto layout = checkpoint::plan_safetensors(declarations, header.metadata);
  std::string file = layout.header;
  require(file.size() % 8 == 0, "data begins at a multiple of 8");
  file.resize(layout.file_bytes());
  const auto again = checkpoint::parse_header(std::as_bytes(std::span(file)), "again");
  require(again.metadata == header.metadata, "metadata comes back");
  require(again.entries.size() == header.entries.size(), "every tensor comes back");
  for (const TensorEntry& entry : header.entries) {
    const TensorEntry* const found = again.find(entry.name);
    require(found != nullptr && found->dtype == entry.dtype && found->shape == entry.shape,
            "a tensor comes back as it was");
  }
}

void check(std::span<const std::byte> file) {
  SafetensorsHeader header;
  try {
    header = checkpoint::parse_header(file, "fuzzed");
  } catch (const UsageError& error) {
    const std::string_view what = error.what();
    require(what.starts_with("safetensors file 'fuzzed'"), "a message names the file");
    require(what.size() < 1500, "a message is short");
    return;
  }
  std::uint64_t position = 0;
  for (const TensorEntry& entry : header.entries) {
    require(entry.begin == position && entry.end >= entry.begin, "tensors follow each other");
    require(header.find(entry.name) == &entry, "every tensor is found by its name");
    position = entry.end;
  }
  require(header.data_offset + position == file.size(), "tensors end with the file");
  check_round_trip(header);
}

}  // namespace

void run(std::span<const std::byte> input) {
  check(input);
  if (input.size() < 2) return;
  std::uint16_t data_bytes = 0;
  std::memcpy(&data_bytes, input.data(), sizeof data_bytes);
  const auto text = input.subspan(sizeof data_bytes);
  const std::uint64_t length = text.size();
  std::vector<std::byte> file(sizeof length + text.size() + data_bytes);
  std::memcpy(file.data(), &length, sizeof length);
  std::copy(text.begin(), text.end(), file.begin() + sizeof length);
  check(file);
}

}  // namespace lockstep::fuzz
