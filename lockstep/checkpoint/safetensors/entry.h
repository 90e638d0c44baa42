// A tensor as a safetensors file describes it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <lockstep/checkpoint/safetensors/dtype.h>

namespace lockstep::checkpoint {

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

// The bytes of so many elements. UsageError that begins with `what` where a size is below zero, the
// elements do not fit into 63 bits, or a type smaller than a byte ends in the middle of one.
std::uint64_t tensor_bytes(DType dtype, std::span<const std::int64_t> shape,
                           const std::string& what);

}  // namespace lockstep::checkpoint
