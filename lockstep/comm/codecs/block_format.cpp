#include <lockstep/comm/codecs/block_format.h>

#include <lockstep/base/error.h>

namespace lockstep::comm {

void check_format(const BlockFormat& format) {
  if (format.block == 0 || format.block % 2 != 0)
    throw UsageError("blocks of {} elements cannot be quantized: give an even number above 0, such "
                     "as 256",
                     format.block);
}

std::size_t num_blocks(std::size_t count, const BlockFormat& format) {
  return count / format.block + (count % format.block != 0 ? 1 : 0);
}

std::size_t scales_offset(std::size_t count, const BlockFormat& format) {
  const std::size_t payload = format.type == QuantizedType::int8 ? count : count / 2 + count % 2;
  return (payload + 3) / 4 * 4;
}

std::size_t encoded_bytes(std::size_t count, const BlockFormat& format) {
  return scales_offset(count, format) + num_blocks(count, format) * sizeof(float);
}

}  // namespace lockstep::comm
