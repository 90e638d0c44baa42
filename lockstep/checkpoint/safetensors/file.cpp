#include <lockstep/checkpoint/safetensors/file.h>

#include <bit>

#include <lockstep/base/error.h>

namespace lockstep::checkpoint {

static_assert(std::endian::native == std::endian::little, "tensors are read as they are");

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : file_(path), header_(parse_header(file_.bytes(), path.string())) {}

std::span<const std::byte> SafetensorsFile::bytes(const TensorEntry& entry) const {
  const auto data = file_.bytes().subspan(header_.data_offset);
  LOCKSTEP_CHECK(entry.begin <= entry.end && entry.end <= data.size(), "an entry of another file");
  return data.subspan(entry.begin, entry.size_bytes());
}

}  // namespace lockstep::checkpoint
