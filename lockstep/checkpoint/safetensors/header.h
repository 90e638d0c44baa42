// The header of a safetensors file: the names, element types and places of its tensors. It may come
// from anywhere, so everything that it says is checked before it is believed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::checkpoint {

enum class DType : std::uint8_t {
  boolean,
  f4,
  f6_e2m3,
  f6_e3m2,
  u8,
  i8,
  f8_e5m2,
  f8_e4m3,
  f8_e8m0,
  f8_e4m3fnuz,
  f8_e5m2fnuz,
  i16,
  u16,
  f16,
  bf16,
  i32,
  u32,
  f32,
  c64,  // two f32
  f64,
  i64,
  u64,
};

// The name in files: "F32", "BOOL".
std::string_view name(DType dtype);

std::optional<DType> dtype_from_name(std::string_view name);

// The bits of an element, as some types have less than a byte.
unsigned bits_of(DType dtype);

// Whether this is a floating-point type that weights can be converted from and to.
bool is_floating(DType dtype);

struct TensorEntry {
  std::string name;
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;  // none for a scalar; any may be 0
  // Where its bytes are, row-major and little-endian, counted from the end of the header.
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  std::uint64_t size_bytes() const { return end - begin; }
  bool operator==(const TensorEntry&) const = default;
};

// The bytes of a tensor. UsageError that begins with `what` where a size is below zero, the
// elements do not fit into 63 bits, or a type smaller than a byte ends in the middle of one.
std::uint64_t tensor_bytes(DType dtype, std::span<const std::int64_t> shape,
                           const std::string& what);

// The most bytes that a header's JSON may have.
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

// Parses the header of a whole file's bytes. A UsageError names the file (`file` is only for that),
// the tensor and what is wrong with it, for: a header that is cut off, too long or no JSON of this
// form, names or keys that are there twice, types that do not exist, shapes that do not fit their
// bytes, bytes that overlap, leave a gap or do not end where the file does.
SafetensorsHeader parse_header(std::span<const std::byte> bytes, std::string_view file);
// Parses the header from the first bytes of a file of `file_bytes`. Nothing after it is looked at.
SafetensorsHeader parse_header(std::span<const std::byte> bytes, std::uint64_t file_bytes,
                               std::string_view file);

}  // namespace lockstep::checkpoint
