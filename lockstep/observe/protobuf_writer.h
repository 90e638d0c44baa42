// The few kinds of field that TensorBoard's messages are made of, in protobuf's encoding.
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep::observe {

// Appends fields to one message. Threading: one thread. Failure: memory only.
class ProtobufWriter {
 public:
  void integer(std::uint32_t field, std::uint64_t value) {
    tag(field, 0);
    varint(value);
  }
  void real64(std::uint32_t field, double value) {
    tag(field, 1);
    fixed(std::bit_cast<std::uint64_t>(value), 8);
  }
  void text(std::uint32_t field, std::string_view value) {
    tag(field, 2);
    varint(value.size());
    bytes_.append(value);
  }
  void message(std::uint32_t field, const ProtobufWriter& value) { text(field, value.bytes_); }
  void real32(std::uint32_t field, float value) {
    tag(field, 5);
    fixed(std::bit_cast<std::uint32_t>(value), 4);
  }

  const std::string& bytes() const { return bytes_; }

 private:
  void tag(std::uint32_t field, std::uint32_t wire_type) { varint(field << 3 | wire_type); }
  void varint(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes_.push_back(static_cast<char>(value | 0x80));
    bytes_.push_back(static_cast<char>(value));
  }
  void fixed(std::uint64_t bits, int size) {
    for (int i = 0; i < size; ++i) bytes_.push_back(static_cast<char>(bits >> (8 * i)));
  }

  std::string bytes_;
};

}  // namespace lockstep::observe
