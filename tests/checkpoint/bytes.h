// Safetensors files made by hand, correct or damaged.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>

namespace lockstep::testing {

inline std::string length_prefix(std::uint64_t length) {
  std::string prefix(sizeof length, '\0');
  std::memcpy(prefix.data(), &length, sizeof length);
  return prefix;
}

inline std::string safetensors_bytes(const std::string& header, const std::string& data = "") {
  return length_prefix(header.size()) + header + data;
}

inline std::span<const std::byte> as_bytes(const std::string& text) {
  return std::as_bytes(std::span(text));
}

inline std::string as_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace lockstep::testing
