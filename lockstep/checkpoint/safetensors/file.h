// Hugging Face's safetensors: named arrays in one file, a JSON header before their bytes. Nothing
// in it can run. safetensors/writer.h writes such files, safetensors/folder.h reads several as one.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string_view>
#include <vector>

#include <lockstep/base/mapped_file.h>
#include <lockstep/checkpoint/safetensors/header.h>

namespace lockstep::checkpoint {

// Ownership: maps the file; entries and spans are valid until it is destroyed or moved from.
// Threading: read-only. Failure: as parse_header and MappedFile, in the constructor.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return file_.path(); }
  const std::vector<TensorEntry>& entries() const { return header_.entries; }
  const Metadata& metadata() const { return header_.metadata; }
  // Nothing where there is none of that name.
  const TensorEntry* find(std::string_view name) const { return header_.find(name); }

  // Of one of its own entries. Not aligned to anything where the writer did not align it.
  std::span<const std::byte> bytes(const TensorEntry& entry) const;

 private:
  MappedFile file_;
  SafetensorsHeader header_;
};

}  // namespace lockstep::checkpoint
