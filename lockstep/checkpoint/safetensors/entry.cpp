#include <lockstep/checkpoint/safetensors/entry.h>

#include <lockstep/base/error.h>
#include <lockstep/checkpoint/safetensors/quote.h>

namespace lockstep::checkpoint {

std::uint64_t tensor_bytes(DType dtype, std::span<const std::int64_t> shape,
                           const std::string& what) {
  std::int64_t elements = 1;  // without the zeros: strides are products of the others
  bool empty = false;
  for (const std::int64_t size : shape) {
    if (size < 0) throw UsageError("{}: the shape {} has a size below 0", what, shape_text(shape));
    empty = empty || size == 0;
    if (size != 0 && __builtin_mul_overflow(elements, size, &elements))
      throw UsageError("{}: the shape {} has 2^63 elements or more", what, shape_text(shape));
  }
  if (empty) return 0;
  std::uint64_t bits = 0;
  if (__builtin_mul_overflow(static_cast<std::uint64_t>(elements), bits_of(dtype), &bits))
    throw UsageError("{}: {} elements of {} are more than a file can hold", what, elements,
                     name(dtype));
  if (bits % 8 != 0)
    throw UsageError("{}: {} elements of {} bits do not fill whole bytes", what, elements,
                     bits_of(dtype));
  return bits / 8;
}

}  // namespace lockstep::checkpoint
