// The codec written from its description: one element at a time, with the library's rounding.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include <lockstep/base/float16.h>
#include <lockstep/comm/codecs/block_format.h>
#include <lockstep/comm/operations/operation.h>

namespace lockstep::comm::testing {

using Bytes = std::vector<std::byte>;

inline float value_at(DType dtype, const Bytes& values, std::size_t index) {
  if (dtype == DType::float32) {
    float value = 0;
    std::memcpy(&value, values.data() + index * 4, 4);
    return value;
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, values.data() + index * 2, 2);
  return dtype == DType::float16 ? to_float(Float16{bits}) : to_float(BFloat16{bits});
}

inline Bytes to_bytes(DType dtype, const std::vector<float>& values) {
  Bytes bytes(values.size() * size_of(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::float32) {
      std::memcpy(bytes.data() + i * 4, &values[i], 4);
    } else {
      const std::uint16_t bits =
          dtype == DType::float16 ? to_float16(values[i]).bits : to_bfloat16(values[i]).bits;
      std::memcpy(bytes.data() + i * 2, &bits, 2);
    }
  }
  return bytes;
}

inline Bytes plain_encode(const BlockFormat& format, const std::vector<float>& values) {
  const std::size_t count = values.size();
  const bool bytewise = format.type == QuantizedType::int8;
  const float most = bytewise ? 127 : 7;
  Bytes message((bytewise ? count : (count + 1) / 2) + 3);
  message.resize(message.size() / 4 * 4);
  Bytes scales;
  for (std::size_t begin = 0; begin < count; begin += format.block) {
    const std::size_t end = std::min(count, begin + format.block);
    float largest = 0;
    bool finite = true;
    for (std::size_t i = begin; i < end; ++i) {
      finite = finite && std::isfinite(values[i]);
      largest = std::max(largest, std::abs(values[i]));
    }
    float scale = std::max(largest / most, std::numeric_limits<float>::min());
    if (std::isinf(scale * most)) scale = std::nextafter(scale, 0.0f);
    if (!finite) scale = std::numeric_limits<float>::quiet_NaN();
    for (std::size_t i = begin; i < end && finite; ++i) {
      const int q = static_cast<int>(std::nearbyint(values[i] * (1 / scale)));
      if (bytewise)
        message[i] = static_cast<std::byte>(q);
      else
        message[i / 2] |= static_cast<std::byte>((q & 15) << (i % 2 * 4));
    }
    const auto* bytes = reinterpret_cast<const std::byte*>(&scale);
    scales.insert(scales.end(), bytes, bytes + 4);
  }
  message.insert(message.end(), scales.begin(), scales.end());
  return message;
}

inline float scale_of(const BlockFormat& format, const Bytes& message, std::size_t count,
                      std::size_t index) {
  float scale = 0;
  std::memcpy(&scale, message.data() + scales_offset(count, format) + index / format.block * 4, 4);
  return scale;
}

inline std::vector<float> plain_decode(const BlockFormat& format, const Bytes& message,
                                       std::size_t count) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    int q = 0;
    if (format.type == QuantizedType::int8) {
      q = static_cast<std::int8_t>(message[i]);
    } else {
      q = static_cast<int>(message[i / 2]) >> (i % 2 * 4) & 15;
      if (q > 7) q -= 16;
    }
    values[i] = static_cast<float>(q) * scale_of(format, message, count, i);
  }
  return values;
}

}  // namespace lockstep::comm::testing
